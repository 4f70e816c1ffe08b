// One layer of the paged KV cache and which part of it a step's sequences use.
#pragma once

#include <cstdint>

#include "dot.h"

namespace epd {

// [block, 2, kv_head, slot, head_dim]: keys, then values, of all heads of one block.
struct PagedKv {
  float* data;
  int32_t kv_heads;
  int32_t block_size;
  int32_t head_dim;

  int64_t head_stride() const { return int64_t{block_size} * head_dim; }
  int64_t side_stride() const { return kv_heads * head_stride(); }
  float* keys(int64_t block, int head) const {
    return data + 2 * block * side_stride() + head * head_stride();
  }
  float* values(int64_t block, int head) const { return keys(block, head) + side_stride(); }
};

// The step's sequences; their query tokens lie behind one another.
struct Sequences {
  const int32_t* block_tables;    // [count, table_stride] block numbers
  const int32_t* query_starts;    // [count + 1] first query token of each sequence
  const int32_t* context_lens;    // [count] tokens with KV, the query tokens included
  const int64_t* slots;           // [tokens] block * block_size + slot each token's KV goes to
  int64_t table_stride;
  int32_t count;
};

// Puts keys and values [tokens, kv_head, head_dim], `stride` floats from token to token, into slots.
inline void write_kv(Strided keys, Strided values, const PagedKv& kv, const int64_t* slots,
                     int token_count) {
  const size_t bytes = kv.head_dim * sizeof(float);
  for (int token = 0; token < token_count; ++token) {
    const int64_t block = slots[token] / kv.block_size;
    const int64_t offset = slots[token] % kv.block_size * kv.head_dim;
    for (int head = 0; head < kv.kv_heads; ++head) {
      const int64_t from = int64_t{head} * kv.head_dim;
      std::memcpy(kv.keys(block, head) + offset, keys.at(token) + from, bytes);
      std::memcpy(kv.values(block, head) + offset, values.at(token) + from, bytes);
    }
  }
}

}  // namespace epd
