// The emulated tile unit, and products on it, against plain sums. With a rule as the argument: a
// use that breaks it, which must not return.
#include "amx_emulated.h"

#include <math.h>

#include <memory>
#include <vector>

using namespace relay;

namespace {

constexpr float NOT_A_NUMBER = __builtin_nanf("");
int failures = 0;

bf16 narrowed(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return {(uint16_t)(bits >> 16)};  // exact for the numbers here
}

// Integers, whose products and sums are exact.
float number(int64_t row, int64_t column) { return (float)((row * 7 + column * 11) % 17 - 8); }

void expect(float got, double wanted, const char* what) {
  if (got == wanted) return;
  if (failures++ < 10) fprintf(stderr, "%s: %g, not %g\n", what, got, wanted);
}

TileConfig shapes(int rows, int pairs, int columns) {
  TileConfig config;
  const int rows_of[3] = {rows, rows, pairs}, bytes_of[3] = {4 * columns, 4 * pairs, 4 * columns};
  for (int i = 0; i < 3; ++i) {
    config.rows[i] = (uint8_t)rows_of[i];
    config.row_bytes[i] = (uint16_t)bytes_of[i];
  }
  return config;
}

// C = A B on tiles 0, 1, 2.  a: [16, 32], b: [16, 16, 2], c: [16, 16]
void multiply(const TileConfig& config, const bf16* a, const bf16* b, float* c) {
  tile_configure(&config);
  tile_load<0>(c, 64);
  tile_load<1>(a, 64);
  tile_load<2>(b, 64);
  tile_multiply<0, 1, 2>();
  tile_store<0>(c, 64);
  tile_release();
}

void check_every_shape() {
  for (int rows = 1; rows <= 16; ++rows)
    for (int pairs = 1; pairs <= 16; ++pairs)
      for (int columns = 1; columns <= 16; ++columns) {
        bf16 a[16 * 32], b[16 * 32];
        float c[16 * 16];
        for (int i = 0; i < 16 * 32; ++i) a[i] = b[i] = narrowed(NOT_A_NUMBER);
        for (int i = 0; i < 16 * 16; ++i) c[i] = (float)i;
        for (int m = 0; m < rows; ++m)
          for (int s = 0; s < 2 * pairs; ++s) a[m * 32 + s] = narrowed(number(m, s));
        for (int s = 0; s < 2 * pairs; ++s)
          for (int n = 0; n < columns; ++n)
            b[s / 2 * 32 + 2 * n + s % 2] = narrowed(number(s + 3, n));
        multiply(shapes(rows, pairs, columns), a, b, c);
        for (int m = 0; m < 16; ++m)
          for (int n = 0; n < 16; ++n) {
            double wanted = m * 16 + n;
            if (m < rows && n < columns)
              for (int s = 0; s < 2 * pairs; ++s) wanted += number(m, s) * number(s + 3, n);
            expect(c[m * 16 + n], wanted, "tile");
          }
      }
}

// One element from `steps` products, added to c.
float one_element(std::vector<float> a, std::vector<float> b, float c) {
  bf16 a_tile[16 * 32] = {}, b_tile[16 * 32] = {};
  float c_tile[16 * 16] = {c};
  for (size_t s = 0; s < a.size(); ++s) {
    a_tile[s] = narrowed(a[s]);
    b_tile[s / 2 * 32 + s % 2] = narrowed(b[s]);
  }
  multiply(shapes(1, (int)a.size() / 2, 1), a_tile, b_tile, c_tile);
  return c_tile[0];
}

void check_rounding() {
  const float large = 0x1p24f;
  expect(one_element({large, 1, 0, 1}, {1, 1, 0, 1}, 0), large + 2, "each half has its own sum");
  expect(one_element({1, 0, 1, 0}, {1, 0, 1, 0}, large), large + 2, "C is added last");
  expect(one_element({0x1p-70f, 0}, {0x1p-70f, 0}, 0), 0, "small results are zero");
  expect(one_element({0x1p-130f, 0}, {0x1p100f, 0}, 0), 0, "small inputs are zero");
  expect(one_element({0, 0}, {0, 0}, 0x1p-130f), 0, "small sums are zero");
}

// MatrixProduct of exactly the memory that it may read, NaN wherever it must not count.
//   tokens_first: panels as keys have them, else as values have them
void check_product(int64_t rows, int64_t steps, int64_t columns, bool tokens_first) {
  const int64_t pairs = ceil_div(steps, 2), panels = ceil_div(columns, W);
  relay_operand operand = {};
  operand.kind = RELAY_PANELS;
  operand.stride = tokens_first ? 2 * W : panels * 2 * W;
  operand.panel = tokens_first ? pairs * 2 * W : 2 * W;
  std::unique_ptr<bf16[]> b(new bf16[panels * pairs * 2 * W]);
  std::unique_ptr<uint32_t[]> a(new uint32_t[rows * pairs]);
  for (int64_t c = 0; c < panels * W; ++c)
    for (int64_t s = 0; s < 2 * pairs; ++s)
      b[c / W * operand.panel + s / 2 * operand.stride + c % W * 2 + s % 2] =
          narrowed(s < steps && c < columns ? number(s + 3, c) : NOT_A_NUMBER);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t s = 0; s < 2 * pairs; ++s)
      ((bf16*)a.get())[r * 2 * pairs + s] = narrowed(s < steps ? number(r, s) : 5.0f);
  std::vector<float> c(rows * panels * W, NOT_A_NUMBER);
  Prefetcher nothing;
  MatrixProduct<bf16> product;
  product.run<false>(rows, a.get(), pairs, operand, b.get(), steps, columns, columns, nothing,
                     c.data(), panels * W);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t column = 0; column < columns; ++column) {
      double wanted = 0;
      for (int64_t s = 0; s < steps; ++s) wanted += number(r, s) * number(s + 3, column);
      expect(c[r * panels * W + column], wanted, "product");
    }
}

void check_products() {
  for (int64_t rows = 1; rows <= 32; ++rows)
    for (int64_t steps : {1, 2, 16, 31, 32, 33, 80, 97})
      for (int64_t columns : {1, 16, 17, 32, 33, 80})
        for (bool tokens_first : {false, true}) check_product(rows, steps, columns, tokens_first);
}

void break_rule(const char* rule) {
  const auto is = [&](const char* name) { return strcmp(rule, name) == 0; };
  alignas(64) bf16 a[16 * 32] = {}, b[16 * 32] = {};
  float c[16 * 16] = {};
  TileConfig config = shapes(4, 5, 6);
  if (is("palette")) config.palette = 0;
  if (is("reserved")) config.reserved[3] = 1;
  if (is("17 rows")) config.rows[0] = 17;
  if (is("65 bytes")) config.row_bytes[0] = 65;
  if (is("bytes without rows")) config.rows[0] = 0;
  if (is("9 tiles")) config.rows[8] = 1, config.row_bytes[8] = 4;
  if (is("tile without shape")) config.rows[1] = 0, config.row_bytes[1] = 0;
  if (is("rows of C")) config.rows[0] = 5;
  if (is("columns of C")) config.row_bytes[0] = 4 * 7;
  if (is("steps of A")) config.row_bytes[1] = 4 * 4;
  if (is("half a pair")) config.row_bytes[1] = 4 * 5 + 2;
  if (is("not configured")) tile_load<0>(c, 64);
  if (is("not released")) tile_configure(&config);
  if (!is("not released")) multiply(config, a, b, c);
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) {
    break_rule(arguments[1]);
    return 0;
  }
  check_every_shape();
  check_rounding();
  check_products();
  return failures > 0;
}
