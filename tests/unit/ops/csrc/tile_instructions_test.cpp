// The instructions of amx_bf16.h and the compiler's intrinsics are the same bytes. None is run.
#include <string.h>

#include "amx_bf16.h"

using namespace relay;

#define IN_SECTION(name) __attribute__((section(#name), used, noinline)) void name##_code

IN_SECTION(ours)(void* config, char* p, long stride) {
  tile_configure(config);
  tile_zero<3>();
  tile_load<5>(p, stride);
  tile_multiply<2, 5, 6>();
  tile_store<7>(p, stride);
  tile_release();
}

IN_SECTION(theirs)(void* config, char* p, long stride) {
  _tile_loadconfig(config);
  _tile_zero(3);
  _tile_loadd(5, p, stride);
  _tile_dpbf16ps(2, 5, 6);
  _tile_stored(7, p, stride);
  _tile_release();
}

extern const char ours_at[] __asm__("__start_ours"), ours_end[] __asm__("__stop_ours");
extern const char theirs_at[] __asm__("__start_theirs"), theirs_end[] __asm__("__stop_theirs");

int main() {
  const long size = ours_end - ours_at;
  return !(size > 30 && size == theirs_end - theirs_at && memcmp(ours_at, theirs_at, size) == 0);
}
