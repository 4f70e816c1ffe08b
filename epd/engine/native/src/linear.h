// Linear layer for few rows: streams the weights once, which is what a decode step is bound by.
#pragma once

#include "dot.h"

namespace epd {

// What happens to x . w before it is written; null pointers mean nothing.
struct LinearOutput {
  float* out;              // [rows, columns]
  const float* bias;       // [columns]
  bool add;                // added to what `out` holds (a residual) instead of replacing it
};

// out = x w^T (+ bias) (+ out); x [row_count, dim], w [col_count, dim] as torch stores it.
inline void linear(const float* x, int row_count, const float* weight, int col_count, int64_t dim,
                   LinearOutput output, int threads) {
  const int panels = (col_count + kLanes - 1) / kLanes;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int panel = 0; panel < panels; ++panel) {
    const int first = panel * kLanes;
    const int width = col_count - first < kLanes ? col_count - first : kLanes;
    const Strided columns{weight + first * dim, dim};
    dot_panel({x, dim}, row_count, columns, width, dim,
              [&](int row, int col, int count, const float* values) {
                float* to = output.out + int64_t{row} * col_count + first + col;
                for (int i = 0; i < count; ++i) {
                  float value = values[i];
                  if (output.bias) value += output.bias[first + col + i];
                  to[i] = output.add ? to[i] + value : value;
                }
              });
  }
}

}  // namespace epd
