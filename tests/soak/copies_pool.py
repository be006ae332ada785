"""An adversarial engine's scheduler and block pool: real token chains, no tensors of KV.

Like vLLM: full blocks enter the prefix cache when they are scheduled, so requests of the same step
hit them; freed blocks keep their content until they are handed out; drafts are written and rolled
back; a request that finds no block preempts the youngest. Worse than vLLM: free blocks are handed
out in the order that serves stale copies best, and every write leaves a content of its own, even
of the same tokens.
"""

from dataclasses import dataclass, field
from random import Random

import numpy as np

from tests.soak.copies_scenario import BLOCK_SIZE, COLUMNS, MAX_TOKENS, Scenario


@dataclass(eq=False)
class Request:
    """A request; a chain node stands for a token and all tokens before it.

    Attributes:
        chain: nodes of all tokens, drafts of the step included. stop: tokens at which it ends.
        computed: tokens that have KV. known: tokens without drafts.
    """

    chain: list[int]
    stop: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    known: int = 0


@dataclass
class Pool:
    """The pool of one engine, its requests and its prefix cache.

    Attributes:
        content: int64 ``[blocks, BLOCK_SIZE]``, one number per write. chain: the node written.
        cached: full block by the node of its last token. node_of: the same by block.
        free, references: as vLLM's. behind: the block that came last at a column behind another.
        system: blocks of each pinned system KV, their ``content`` and ``chain``.
    """

    rng: Random
    scenario: Scenario

    def __post_init__(self) -> None:
        count = self.scenario.blocks
        self.content = np.zeros((count, BLOCK_SIZE), dtype=np.int64)
        self.chain = np.zeros((count, BLOCK_SIZE), dtype=np.int64)
        self.free = list(range(1, count))  # block 0 is vLLM's null block
        self.references = [0] * count
        self.behind: dict[tuple[int, int], int] = {}
        self.cached: dict[int, int] = {}
        self.node_of: dict[int, int] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.system: list[tuple[list[int], np.ndarray, np.ndarray]] = []
        self._children: dict[tuple[int, int], int] = {}
        self._writes = 0

    def write(self, slots: np.ndarray, nodes: list[int]) -> None:
        """Write the KV of these nodes, int64 ``[n]`` slots."""
        self.content.reshape(-1)[slots] = np.arange(self._writes + 1, self._writes + 1 + len(slots))
        self.chain.reshape(-1)[slots] = nodes
        self._writes += len(slots)

    def child(self, node: int, token: int) -> int:
        return self._children.setdefault((node, token), len(self._children) + 1)

    def tokens(self, count: int) -> list[int]:
        """A chain from the root, of which others have the beginning."""
        chain, node, token = [], 0, 0
        for position in range(count):
            if position % BLOCK_SIZE == 0:
                token = int(self.rng.random() < 0.3)
            node = self.child(node, token)
            chain.append(node)
        return chain

    # Blocks.

    def take(self, blocks: list[int], choice: set[int] | None = None) -> bool:
        """Append a free block to these blocks and forget its hash; False without one.

        Args:
            choice: blocks that may be taken; None for all.
        """
        free = [block for block in self.free if choice is None or block in choice]
        if not free:
            return False
        key = len(blocks), blocks[-1] if blocks else 0
        last, order = self.behind.get(key, 0), self.scenario.order
        if order == "column" and last in free:
            block = last
        elif choice is not None:
            block = min(free)
        else:
            block = free[{"lifo": -1, "random": self.rng.randrange(len(free))}.get(order, 0)]
        self.free.remove(block)
        self.uncache(block)
        self.references[block], self.behind[key] = 1, block
        if self.scenario.zeroes:
            self.content[block] = self.chain[block] = 0
        blocks.append(block)
        return True

    def uncache(self, block: int) -> None:
        node = self.node_of.pop(block, None)
        if node is not None:
            del self.cached[node]

    def hold(self, block: int) -> None:
        if self.references[block] == 0:
            self.free.remove(block)
        self.references[block] += 1

    def drop(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free.append(block)

    def cache_full(self, blocks: list[int], chain: list[int]) -> None:
        """Enter all blocks that this chain fills into the prefix cache."""
        for end in range(BLOCK_SIZE, len(chain) + 1, BLOCK_SIZE):
            node, block = chain[end - 1], blocks[end // BLOCK_SIZE - 1]
            if node not in self.cached and block not in self.node_of:
                self.cached[node], self.node_of[block] = block, node

    # Requests.

    def release(self, request: Request) -> None:
        self.running.remove(request)
        self.drop(request.blocks)
        request.blocks, request.computed = [], 0
        del request.chain[request.known :]

    def finish_some(self) -> None:
        """End requests that are long enough, abort some or most, and forget a block's hash."""
        if self.node_of and self.rng.random() < 0.05:
            self.uncache(self.rng.choice(list(self.node_of)))
        aborted = 0.02 if self.rng.random() < 0.97 else 0.8
        for request in list(self.running):
            if request.known >= request.stop or self.rng.random() < aborted:
                self.release(request)

    def schedule(self) -> dict[Request, int]:
        """Query tokens of each request of the step."""
        queries: dict[Request, int] = {}
        for request in list(self.running):
            if request in self.running:
                self._go_on(request, queries)
        while len(self.running) < self.scenario.rows and self.rng.random() < 0.6:
            if not self._admit(queries):
                break
        return queries

    def _go_on(self, request: Request, queries: dict[Request, int]) -> None:
        left = request.known - request.computed
        if left == 1 and self.scenario.drafts:
            for _ in range(self.rng.randint(0, self.scenario.drafts)):
                if len(request.chain) < MAX_TOKENS:
                    request.chain.append(self.child(request.chain[-1], self.rng.randrange(2)))
        count = min(len(request.chain) - request.computed, self.scenario.chunk)
        while not self._allocate(request, request.computed + count):
            victim = self.running[-1]
            self.release(victim)
            self.waiting.insert(0, victim)
            if victim is request:
                return
        queries[request] = count
        end = min(request.computed + count, request.known)  # drafts are not cached
        self.cache_full(request.blocks, request.chain[:end])

    def _admit(self, queries: dict[Request, int]) -> bool:
        request = self.waiting.pop(0) if self.waiting else self._new_request()
        for end in range(BLOCK_SIZE, request.known, BLOCK_SIZE):
            block = self.cached.get(request.chain[end - 1])
            if block is None:
                break
            self.hold(block)
            request.blocks.append(block)
            request.computed = end
        self._copy_partly(request, queries)
        count = min(request.known - request.computed, self.scenario.chunk)
        if not self._allocate(request, request.computed + count):
            self.drop(request.blocks)
            request.blocks, request.computed = [], 0
            self.waiting.insert(0, request)
            return False
        self.running.append(request)
        queries[request] = count
        self.cache_full(request.blocks, request.chain[: request.computed + count])
        return True

    def _new_request(self) -> Request:
        if self.running and self.rng.random() < 0.2:
            donor = self.rng.choice(self.running)
            chain = donor.chain[: donor.known]
        elif self.system and self.rng.random() < 0.5:
            chain = self.rng.choice(self.system)[2].reshape(-1).tolist()
            chain.append(self.child(chain[-1], self.rng.randrange(4)))
        else:
            chain = self.tokens(self.rng.randint(2, MAX_TOKENS - 4))
            for _ in range(self.rng.randint(0, 3)):
                chain.append(self.child(chain[-1], self.rng.randrange(4)))
        stop = min(MAX_TOKENS, len(chain) + self.rng.randint(1, 9))
        return Request(chain=chain, stop=stop, known=len(chain))

    def _copy_partly(self, request: Request, queries: dict[Request, int]) -> None:
        """Copy the KV of a request that has computed some of the next block's tokens."""
        if not self.scenario.copies or not self.free:
            return
        begin = request.computed
        for donor in self.running:
            if donor in queries or donor.computed <= begin:
                continue
            most = min(donor.computed, begin + BLOCK_SIZE - 1, request.known - 1)
            same = begin
            while same < most and donor.chain[same] == request.chain[same]:
                same += 1
            if same > begin:
                self.take(request.blocks)
                block, source = request.blocks[-1], donor.blocks[begin // BLOCK_SIZE]
                self.content[block], self.chain[block] = self.content[source], self.chain[source]
                request.computed = same
                return

    def _allocate(self, request: Request, tokens: int) -> bool:
        # With drafts vLLM reserves blocks that a step need not write.
        tokens = min(tokens + self.scenario.drafts, MAX_TOKENS)
        needed = -(-tokens // BLOCK_SIZE) - len(request.blocks)
        if needed > len(self.free):
            return False
        for _ in range(needed):
            self.take(request.blocks)
        return True

    def advance(self, queries: dict[Request, int]) -> None:
        """After the pass: count what is computed, roll drafts back, add a sampled token."""
        for request, count in queries.items():
            end = request.computed + count
            if end < request.known:
                request.computed = end
                continue
            accepted = self.rng.randint(request.known, end)
            request.computed = accepted
            del request.chain[accepted:]
            if accepted < MAX_TOKENS:
                request.chain.append(self.child(request.chain[-1], self.rng.randrange(2)))
            request.known = len(request.chain)

    # System KVs.

    def load(self, untouched: set[int]) -> list[list[int]]:
        """Write some chains into free blocks outside of a pass and pin them; their blocks.

        Args:
            untouched: blocks that no request held in the last step.
        """
        room = self.scenario.blocks - COLUMNS  # leave one request its blocks
        for _ in range(self.rng.randint(1, 2)):
            chain = self.tokens(BLOCK_SIZE * self.rng.randint(1, 3))
            if self.running and self.rng.random() < 0.5:
                # A block that a request holds, and others behind it.
                chain = self.rng.choice(self.running).chain[:BLOCK_SIZE]
                while len(chain) % BLOCK_SIZE or len(chain) < 2 * BLOCK_SIZE:
                    chain.append(self.child(chain[-1], 2))
            blocks: list[int] = []
            for column in range(len(chain) // BLOCK_SIZE):
                nodes = chain[column * BLOCK_SIZE : (column + 1) * BLOCK_SIZE]
                block = self.cached.get(nodes[-1])
                if block in self.free and self.rng.random() < 0.7:
                    self.uncache(block)
                    block = None
                if block is not None and room > 0:
                    self.hold(block)
                    blocks.append(block)
                    room -= 1
                elif block is None and room > 0 and self.take(blocks, untouched):
                    room -= 1
                    self.write(blocks[-1] * BLOCK_SIZE + np.arange(BLOCK_SIZE), nodes)
                else:
                    break
                self.cache_full(blocks, chain[: len(blocks) * BLOCK_SIZE])
            if blocks:
                self.system.append((blocks, self.content[blocks], self.chain[blocks]))
        return [blocks for blocks, _, _ in self.system]

    def reset(self) -> None:
        """Preempt all requests and forget the prefix cache; the KV may be lost, too."""
        for request in list(self.running):
            self.release(request)
            self.waiting.append(request)
        del self.waiting[8:]
        for block in list(self.node_of):
            self.uncache(block)
        if self.rng.random() < 0.5:
            self.write(np.arange(self.content.size), [-1] * self.content.size)

    def rewrite(self) -> list[list[int]]:
        """Write the contents of system KVs again, after a reset; their blocks."""
        for blocks, content, chain in self.system:
            self.content[blocks], self.chain[blocks] = content, chain
            self.cache_full(blocks, chain.reshape(-1).tolist())
        return [blocks for blocks, _, _ in self.system]

    def unpin(self) -> None:
        """Give the blocks of system KVs back."""
        for blocks, _, _ in self.system:
            self.drop(blocks)
        self.system = []
