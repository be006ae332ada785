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
  int64_t partial;      /* index of the partial that the result belongs to */
  int64_t layout;       /* index into layouts */
  const int32_t* table; /* [ceil(keys / block_tokens)], block ids of a paged sequence */
} relay_sequence;

/* Runs fn(data) on this many threads and waits: GOMP_parallel of the runtime that torch uses. */
typedef void (*relay_parallel)(void (*fn)(void*), void* data, unsigned threads, unsigned flags);

typedef struct {
  int64_t dtype, out_dtype;
  int64_t heads, kv_heads, head_size; /* head_size: a multiple of 16, at most 256 */
  int64_t tokens, partials, threads;
  double scale;
  const void* q; /* [tokens, heads, D], dtype */
  int64_t q_token, q_head;
  const int64_t* places; /* [tokens], the row of each token in q and in fused; NULL: in order */
  void* out;             /* [partials, tokens, heads, D], out_dtype */
  int64_t out_partial, out_token, out_head;
  float* lse; /* [partials, heads, tokens] */
  int64_t lse_partial, lse_head, lse_token;
  const relay_layout* layouts;     /* [num_layouts] */
  const relay_sequence* sequences; /* [num_sequences] */
  int64_t num_layouts, num_sequences;
  void* fused; /* [rows, heads, D], dtype, written at `places`; NULL: partials are not fused */
  int64_t fused_token, fused_head;
  relay_parallel parallel;
} relay_call;

typedef struct {
  int64_t dtype, fused_dtype; /* the same, or dtype is RELAY_F32 */
  int64_t tokens, heads, head_size, partials, threads;
  const void* const* outs;  /* [partials] of [tokens, heads, D], dtype */
  const float* const* lses; /* [partials] of [heads, tokens] */
  const int64_t* out_token; /* [partials], as the three below: strides of each */
  const int64_t* out_head;
  const int64_t* lse_token;
  const int64_t* lse_head;
  const int64_t* places; /* [tokens], the row of each token in fused; NULL: in order */
  void* fused;           /* [rows, heads, D], fused_dtype; may be one of outs if places is NULL */
  int64_t fused_token, fused_head;
  relay_parallel parallel;
} relay_fuse_call;

enum relay_error { RELAY_OK = 0, RELAY_BAD_BLOCK = 1, RELAY_NO_MEMORY = 2 };

/* Attends every sequence and writes its partial of out and lse. With fused, sets lse to -inf for
   tokens that a partial lacks and fuses the partials. Returns a relay_error. */
int relay_attend(const relay_call* call);

/* Fuses partials by their LSE. Returns a relay_error. */
int relay_fuse(const relay_fuse_call* call);

/* Returns the bytes of one packed operand of one KV head; writes its strides to layout. */
int64_t relay_packed(int64_t dtype, int64_t head_size, int64_t tokens, relay_layout* layout);

/* Packs a sequence's keys and values, of all KV heads, into `to` with strides of relay_packed; of
   the sequence, keys and table are read. Returns a relay_error. */
int relay_pack(int64_t dtype, int64_t head_size, int64_t kv_heads, const relay_layout* from,
               const relay_sequence* sequence, const relay_layout* to, int64_t threads,
               relay_parallel parallel);

/* Instruction sets that were compiled and that this machine has, best first, e.g.
   "avx512_bf16 avx512 avx2 portable". */
const char* relay_isas(void);

/* The instruction set in use. */
const char* relay_isa(void);

/* Changes the instruction set in use; 0: no such one. */
int relay_use_isa(const char* name);

/* sizeof of relay_operand, relay_layout, relay_sequence, relay_call, relay_fuse_call. */
void relay_sizes(int64_t sizes[5]);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
