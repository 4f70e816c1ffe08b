// Dot products between rows and columns that are both stored along the summed dimension.
//
// Every product is summed in one fixed order (kLanes partial sums along the dimension, then one
// tree of neighbours), whatever tile it falls into. So a token's numbers do not depend on what
// shares its step, on how its prompt was cut into chunks, or on the number of threads.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace epd {

// Vectors of `count` consecutive items of `dim` floats, `stride` floats apart.
struct Strided {
  const float* data;
  int64_t stride;

  const float* at(int64_t index) const { return data + index * stride; }
};

// Lane r * kCols + c of the result is rows[r] . cols[c].
template <int kRows>
inline Lanes dot_tile(const float* rows, int64_t row_stride, const float* cols, int64_t col_stride,
                      int64_t dim) {
  constexpr int kCols = kLanes / kRows;
  Lanes sums[kLanes] = {};
  int64_t k = 0;
  for (; k + kLanes <= dim; k += kLanes) {
    Lanes row[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) row[r] = load(rows + r * row_stride + k);
#pragma GCC unroll 16
    for (int c = 0; c < kCols; ++c) {
      const Lanes col = load(cols + c * col_stride + k);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) sums[r * kCols + c] += row[r] * col;
    }
  }
  if (const int rest = static_cast<int>(dim - k)) {
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kCols; ++c)
        sums[r * kCols + c] += load_part(rows + r * row_stride + k, rest) *
                               load_part(cols + c * col_stride + k, rest);
  }
  return sum_each(sums);
}

// One product, in the same order of additions as a tile.
inline float dot_one(const float* row, const float* col, int64_t dim) {
  Lanes sum{};
  int64_t k = 0;
  for (; k + kLanes <= dim; k += kLanes) sum += load(row + k) * load(col + k);
  if (const int rest = static_cast<int>(dim - k))
    sum += load_part(row + k, rest) * load_part(col + k, rest);
  for (int step = 1; step < kLanes; step *= 2)
    for (int lane = 0; lane < kLanes; lane += 2 * step) sum[lane] += sum[lane + step];
  return sum[0];
}

namespace detail {

template <int kRows, typename Visit>
inline int dot_rows(Strided rows, int row, int row_count, Strided cols, int64_t dim,
                    Visit&& visit) {
  constexpr int kCols = kLanes / kRows;
  for (; row + kRows <= row_count; row += kRows) {
    for (int col = 0; col < kLanes; col += kCols) {
      float values[kLanes];
      store(values, dot_tile<kRows>(rows.at(row), rows.stride, cols.at(col), cols.stride, dim));
      for (int r = 0; r < kRows; ++r) visit(row + r, col, kCols, values + r * kCols);
    }
  }
  return row;
}

}  // namespace detail

// A panel is at most kLanes columns. Calls visit(row, col, count, values) so that every pair of a
// row and a column is covered once: values[i] = rows[row] . cols[col + i].
template <typename Visit>
inline void dot_panel(Strided rows, int row_count, Strided cols, int col_count, int64_t dim,
                      Visit&& visit) {
  if (col_count < kLanes) {  // a full tile would read past the last column
    for (int row = 0; row < row_count; ++row)
      for (int col = 0; col < col_count; ++col) {
        const float value = dot_one(rows.at(row), cols.at(col), dim);
        visit(row, col, 1, &value);
      }
    return;
  }
  int row = detail::dot_rows<4>(rows, 0, row_count, cols, dim, visit);
  row = detail::dot_rows<2>(rows, row, row_count, cols, dim, visit);
  detail::dot_rows<1>(rows, row, row_count, cols, dim, visit);
}

}  // namespace epd
