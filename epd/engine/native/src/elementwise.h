// The parts of a decoder layer between its matrix products.
#pragma once

#include <cmath>

#include "lanes.h"

namespace epd {

// out = x / rms(x) * weight, per row of `dim`.
inline void rms_norm(const float* x, const float* weight, float* out, int rows, int64_t dim,
                     float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int row = 0; row < rows; ++row) {
    const float* from = x + row * dim;
    float* to = out + row * dim;
    Lanes squares{};
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) squares += load(from + i) * load(from + i);
    float sum = sum_lanes(squares);
    for (; i < dim; ++i) sum += from[i] * from[i];
    const float factor = 1.0f / std::sqrt(sum / static_cast<float>(dim) + eps);
    for (i = 0; i < dim; ++i) to[i] = from[i] * factor * weight[i];
  }
}

// Rotary positions in place on `heads` heads of one token, the two halves of a head paired.
inline void rotate(float* x, int heads, int head_dim, const float* cosine, const float* sine) {
  const int half = head_dim / 2;
  for (int head = 0; head < heads; ++head) {
    float* low = x + int64_t{head} * head_dim;
    float* high = low + half;
    for (int i = 0; i < half; ++i) {
      const float a = low[i], b = high[i];
      low[i] = a * cosine[i] - b * sine[i];
      high[i] = b * cosine[half + i] + a * sine[half + i];
    }
  }
}

// out = silu(gate) * up; gate_up [rows, 2 * dim] holds gate, then up.
inline void silu_times(const float* gate_up, float* out, int rows, int64_t dim, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int row = 0; row < rows; ++row) {
    const float* gate = gate_up + row * 2 * dim;
    const float* up = gate + dim;
    float* to = out + row * dim;
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      const Lanes g = load(gate + i);
      store(to + i, g / (1.0f + exp_each(-g)) * load(up + i));
    }
    if (const int rest = static_cast<int>(dim - i)) {
      const Lanes g = load_part(gate + i, rest);
      const Lanes product = g / (1.0f + exp_each(-g)) * load_part(up + i, rest);
      std::memcpy(to + i, &product, rest * sizeof(float));
    }
  }
}

}  // namespace epd
