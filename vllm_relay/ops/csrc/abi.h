/* The C ABI; ops/native/library.py mirrors these structs and compares their sizes.

   Strides and offsets count elements. D = head_size. Nothing is checked here but block ids: the
   caller checks shapes, dtypes and lengths. */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

enum relay_dtype { RELAY_BF16 = 0, RELAY_F16 = 1, RELAY_F32 = 2 };

/* The order of one KV head's keys or values in memory, as the matrix product reads them:
   scores = q . keys, steps are channels and columns are tokens; output = weights . values, steps
   are tokens and columns are channels. */
enum relay_kind {
  RELAY_ROWS = 0,   /* (step, column) at step * stride + column: values token by token, and the
                       keys of vLLM's instruction set "vec", transposed within a block */
  RELAY_ACROSS = 1, /* at column * stride + step: keys token by token */
  RELAY_PANELS = 2  /* packed: vectors of columns, `panel` apart, each with all its steps, `stride`
                       apart; steps come in pairs where they are multiplied in pairs */
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

/* Query tokens that are adjacent in the call's order, and the keys that they attend to. */
typedef struct {
  int64_t first, queries;
  int64_t keys;
  int64_t causal;       /* 1: query i sees the first keys - queries + 1 + i keys; 0: all */
  int64_t start;        /* position of the first key */
  int64_t partial;      /* index of the partial that the result belongs to */
  int64_t layout;       /* index into layouts */
  const int32_t* table; /* [ceil(keys / block_tokens)], block ids of a paged sequence */
} relay_sequence;

/* Runs fn(data) on this many threads and waits: GOMP_parallel of the runtime that torch uses. */
typedef void (*relay_parallel)(void (*fn)(void*), void* data, unsigned threads, unsigned flags);

/* The row of each (token, head): at base + token * `token` + head * `head`. */
typedef struct {
  void* base;
  int64_t token, head;
} relay_rows;

/* One attention result. */
typedef struct {
  relay_rows out; /* [tokens, heads, D], partial_dtype */
  relay_rows lse; /* [tokens, heads], float; base NULL: not written */
} relay_partial;

/* The scores of a layer, from the product s of a query at position p and a key at position k:
   softcap tanh(s scale / softcap), or s scale where softcap is 0, plus slope (k - p). */
typedef struct {
  double scale, softcap;
  int64_t window;      /* 0, or a query sees the keys with p - window < k */
  const float* slopes; /* ALiBi's, [heads], or NULL */
  const float* sinks;  /* logits of a key without a value, [heads], or NULL */
} relay_scores;

/* Packing reads no query, partial or fused; fusion alone reads partials, fused and sinks. */
typedef struct {
  int64_t dtype, partial_dtype;       /* the same, or partial_dtype is RELAY_F32 */
  int64_t heads, kv_heads, head_size; /* head_size: a multiple of 16, at most 512 */
  int64_t tokens, threads;
  relay_scores scores;
  relay_rows q;          /* [rows, heads, D], dtype */
  relay_rows fused;      /* [rows, heads, D], dtype; base NULL: partials are not fused. It may be
                            one of the partials if places is NULL */
  const int64_t* places; /* [tokens], the row of each token in q and in fused; NULL: in order */
  const int64_t* positions;        /* [tokens], read with a window or slopes */
  const relay_partial* partials;   /* [num_partials] */
  const relay_layout* layouts;     /* [num_layouts] */
  const relay_sequence* sequences; /* [num_sequences] */
  int64_t num_partials, num_layouts, num_sequences;
  relay_parallel parallel;
} relay_call;

enum relay_error { RELAY_OK = 0, RELAY_BAD_BLOCK = 1, RELAY_NO_MEMORY = 2 };

/* Attends every sequence and writes its partial. With fused, sets lse to -inf for tokens that a
   partial lacks and fuses the partials. Sinks count once: in the fusion, or else in every partial.
   Returns a relay_error. */
int relay_attend(const relay_call* call);

/* Fuses partials by their LSE. Returns a relay_error. */
int relay_fuse(const relay_call* call);

/* Returns the bytes of one packed operand of one KV head; writes its strides to layout. */
int64_t relay_packed(int64_t dtype, int64_t head_size, int64_t tokens, relay_layout* layout);

/* Packs the keys and values of the one paged sequence, of all KV heads, into `to` with strides of
   relay_packed. Returns a relay_error. */
int relay_pack(const relay_call* call, const relay_layout* to);

/* Instruction sets that were compiled and that this machine has, best first, e.g.
   "avx512_bf16 avx512 avx2 portable". */
const char* relay_isas(void);

/* The instruction set in use. */
const char* relay_isa(void);

/* Changes the instruction set in use; 0: no such one. */
int relay_use_isa(const char* name);

/* sizeof of relay_operand, relay_layout, relay_sequence, relay_partial, relay_scores, relay_call. */
extern const int64_t relay_sizes[6];

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
