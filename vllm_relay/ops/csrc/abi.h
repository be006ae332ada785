/* What Python calls (vllm_relay/ops/native/library.py mirrors these structs): plain C, no PyTorch.

   All strides count elements. Nothing is checked here but block ids; the caller sees to shapes. */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

enum relay_dtype { RELAY_BF16 = 0, RELAY_F16 = 1, RELAY_F32 = 2 };

/* How one KV head's keys or values lie in memory, as the product sees them that reads them:
   scores = q . keys goes step by step over channels, with tokens for columns; output = weights .
   values over tokens, with channels for columns. */
enum relay_kind {
  RELAY_ROWS = 0,   /* (step, column) at step * stride + column: values token by token, and keys of
                       vLLM's instruction set "vec", which are transposed within a block */
  RELAY_ACROSS = 1, /* at column * stride + step: keys token by token */
  RELAY_PANELS = 2  /* what relay_pack makes: vectors of columns, `panel` apart, each with all its
                       steps, `stride` apart; bf16 steps come in pairs where the machine multiplies
                       them so */
};

typedef struct {
  const void* base; /* KV head 0 of the first token, or of block 0 */
  int64_t stride;
  int64_t panel;
  int64_t head;  /* between KV heads */
  int64_t block; /* between blocks */
  int64_t kind;
} relay_operand;

typedef struct {
  relay_operand k, v;
  int64_t block_tokens; /* 0: not paged */
  int64_t blocks;
} relay_layout;

/* Queries that are adjacent in the call's order, and the keys that they attend to. */
typedef struct {
  int64_t first, queries;
  int64_t keys;
  int64_t causal;       /* query i sees the first keys - queries + 1 + i; 0: every one sees all */
  int64_t partial;      /* which partial result this is */
  int64_t layout;       /* index into layouts */
  const int32_t* table; /* the blocks of a paged sequence, in order */
} relay_sequence;

/* Run fn(data) on this many threads and wait: GOMP_parallel, of the runtime that torch uses. */
typedef void (*relay_parallel)(void (*fn)(void*), void* data, unsigned threads, unsigned flags);

typedef struct {
  int64_t dtype, out_dtype;
  int64_t heads, kv_heads, head_size; /* head_size: a multiple of 16, at most 256 */
  int64_t tokens, partials, threads;
  double scale;
  const void* q;
  int64_t q_token, q_head;
  const int64_t* places; /* where each of the call's tokens is in q and in fused; NULL: in order */
  void* out;             /* [partials, tokens, heads, head_size], out_dtype */
  int64_t out_partial, out_token, out_head;
  float* lse; /* [partials, heads, tokens] */
  int64_t lse_partial, lse_head, lse_token;
  const relay_layout* layouts;
  const relay_sequence* sequences;
  int64_t num_layouts, num_sequences;
  void* fused; /* NULL, or [.., heads, head_size] of dtype: the partials fused, at `places` */
  int64_t fused_token, fused_head;
  relay_parallel parallel;
} relay_call;

typedef struct {
  int64_t dtype, fused_dtype; /* the same, or dtype is RELAY_F32 */
  int64_t tokens, heads, head_size, partials, threads;
  const void* const* outs; /* of each partial: [tokens, heads, head_size], dtype */
  const float* const* lses; /* of each partial: [heads, tokens] */
  const int64_t* out_token; /* strides of each partial */
  const int64_t* out_head;
  const int64_t* lse_token;
  const int64_t* lse_head;
  const int64_t* places;
  void* fused; /* may be one of outs where places is NULL */
  int64_t fused_token, fused_head;
  relay_parallel parallel;
} relay_fuse_call;

enum relay_error { RELAY_OK = 0, RELAY_BAD_BLOCK = 1, RELAY_NO_MEMORY = 2 };

/* Every sequence attended to, its result written to its partial of out and lse; where fused is
   given the partials are fused, and lse must hold -inf for tokens that a partial lacks. */
int relay_attend(const relay_call* call);

/* The merge of partials by their LSE alone. */
int relay_fuse(const relay_fuse_call* call);

/* Bytes of one packed operand of one KV head, and its layout: stride and panel. */
int64_t relay_packed(int64_t dtype, int64_t head_size, int64_t tokens, relay_layout* layout);

/* Pack the keys and values of a sequence (first, queries and causal are not read) for all KV heads
   into `to`, laid out by relay_packed. */
int relay_pack(int64_t dtype, int64_t head_size, int64_t kv_heads, const relay_layout* from,
               const relay_sequence* sequence, const relay_layout* to, int64_t threads,
               relay_parallel parallel);

/* Instruction sets that were compiled and that this machine has, best first, e.g.
   "avx512_bf16 avx512 avx2 portable"; the one in use, which relay_use_isa changes (0: unknown). */
const char* relay_isas(void);
const char* relay_isa(void);
int relay_use_isa(const char* name);

/* sizeof of relay_operand, relay_layout, relay_sequence, relay_call, relay_fuse_call. */
void relay_sizes(int64_t sizes[5]);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
