// A few query rows on their way through the blocks of one sequence: online softmax.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "dot.h"

namespace epd {

// Rows share every read of keys and values. Row state: maximum and sum of weights so far, and the
// weighted sum of values. A row's arithmetic is the same in every tile.
class SoftmaxTile {
 public:
  SoftmaxTile(int max_rows, int head_dim, int block_size)
      : head_dim_(head_dim),
        score_stride_((block_size + kLanes - 1) / kLanes * kLanes),
        queries_(static_cast<size_t>(max_rows) * head_dim),
        scores_(static_cast<size_t>(max_rows) * score_stride_),
        values_(static_cast<size_t>(max_rows) * head_dim),
        maxima_(max_rows),
        sums_(max_rows) {}

  void clear() { rows_ = 0; }

  void add_row(const float* query) {
    std::memcpy(&queries_[static_cast<size_t>(rows_) * head_dim_], query,
                head_dim_ * sizeof(float));
    std::fill_n(value_row(rows_), head_dim_, 0.0f);
    maxima_[rows_] = -INFINITY;
    sums_[rows_++] = 0.0f;
  }

  // Takes in the first `slot_count` slots of a block; of those, row r sees at most visible(r).
  template <typename Visible>
  void take_block(const float* keys, const float* block_values, int slot_count, float scale,
                  Visible&& visible) {
    for (int slot = 0; slot < slot_count; slot += kLanes) {
      const int count = std::min(kLanes, slot_count - slot);
      dot_panel({queries_.data(), head_dim_}, rows_,
                {keys + int64_t{slot} * head_dim_, head_dim_}, count, head_dim_,
                [&](int row, int col, int width, const float* products) {
                  float* to = score_row(row) + slot + col;
                  for (int i = 0; i < width; ++i) to[i] = products[i] * scale;
                });
    }
    for (int row = 0; row < rows_; ++row) weigh(row, std::min(visible(row), slot_count));
    int row = 0;
    for (; row + kRowsAtOnce <= rows_; row += kRowsAtOnce)
      add_values<kRowsAtOnce>(row, block_values, slot_count);
    for (; row < rows_; ++row) add_values<1>(row, block_values, slot_count);
  }

  void write_row(int row, float* out) const {
    const float share = 1.0f / sums_[row];
    const float* values = &values_[static_cast<size_t>(row) * head_dim_];
    for (int d = 0; d < head_dim_; ++d) out[d] = values[d] * share;
  }

 private:
  static constexpr int kRowsAtOnce = kLanes / 4;  // with 4 vectors each, what registers hold

  float* score_row(int row) { return &scores_[static_cast<size_t>(row) * score_stride_]; }
  float* value_row(int row) { return &values_[static_cast<size_t>(row) * head_dim_]; }

  // Turns a row's scores into weights relative to its new maximum; unseen slots weigh nothing.
  void weigh(int row, int visible) {
    float* scores = score_row(row);
    if (visible <= 0) {
      std::fill_n(scores, score_stride_, 0.0f);
      return;
    }
    std::fill(scores + visible, scores + score_stride_, -INFINITY);
    Lanes highest = load(scores);
    for (int slot = kLanes; slot < visible; slot += kLanes)
      highest = load(scores + slot) > highest ? load(scores + slot) : highest;
    const float maximum = std::max(maxima_[row], max_lane(highest));
    if (maximum > maxima_[row]) {
      const float shrink = exp_each(Lanes{} + (maxima_[row] - maximum))[0];
      float* values = value_row(row);
      for (int d = 0; d < head_dim_; ++d) values[d] *= shrink;
      sums_[row] *= shrink;
      maxima_[row] = maximum;
    }
    Lanes sum{};
    for (int slot = 0; slot < score_stride_; slot += kLanes) {
      const Lanes all = exp_each(load(scores + slot) - maximum);
      const Lanes seen = load(scores + slot) > -INFINITY ? all : Lanes{};
      store(scores + slot, seen);
      sum += seen;
    }
    sums_[row] += sum_lanes(sum);
  }

  template <int kRows>
  void add_values(int row, const float* block_values, int slot_count) {
    int d = 0;
    for (; d + 4 * kLanes <= head_dim_; d += 4 * kLanes)
      add_value_columns<kRows, 4>(row, block_values + d, slot_count, d);
    for (; d < head_dim_; d += kLanes)
      add_value_columns<kRows, 1>(row, block_values + d, slot_count, d);
  }

  template <int kRows, int kVectors>
  void add_value_columns(int row, const float* columns, int slot_count, int d) {
    Lanes sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) sums[r][v] = load(value_row(row + r) + d + v * kLanes);
    const float* weights = score_row(row);
    for (int slot = 0; slot < slot_count; ++slot) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Lanes value = load(columns + int64_t{slot} * head_dim_ + v * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sums[r][v] += weights[r * score_stride_ + slot] * value;
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) store(value_row(row + r) + d + v * kLanes, sums[r][v]);
  }

  int rows_ = 0;
  int head_dim_;
  int score_stride_;
  std::vector<float> queries_, scores_, values_, maxima_, sums_;
};

}  // namespace epd
