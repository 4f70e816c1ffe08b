// Causal attention of a step's query tokens over the paged KV cache.
#pragma once

#include "paged_kv.h"
#include "softmax_tile.h"

namespace epd {

constexpr int kTileRows = 48;  // query rows that share each read of a block

// Some query tokens of one sequence with the query heads of one KV head.
struct AttentionTile {
  int32_t sequence;
  int32_t kv_head;
  int32_t first_token;
  int32_t token_count;
};

inline std::vector<AttentionTile> attention_tiles(const Sequences& sequences, int kv_heads,
                                                  int tokens_per_tile) {
  std::vector<AttentionTile> tiles;
  for (int32_t s = 0; s < sequences.count; ++s) {
    const int32_t end = sequences.query_starts[s + 1];
    for (int32_t token = sequences.query_starts[s]; token < end; token += tokens_per_tile)
      for (int32_t head = 0; head < kv_heads; ++head)
        tiles.push_back({s, head, token, std::min(tokens_per_tile, end - token)});
  }
  return tiles;
}

// queries: `heads` x head_dim floats at each token; out [tokens, heads, head_dim].
// Every sequence's KV, its query tokens' included, is in its blocks already.
inline void paged_attention(Strided queries, float* out, int heads, const PagedKv& kv,
                            const Sequences& sequences, float scale, int threads) {
  const int group = heads / kv.kv_heads;
  const int tokens_per_tile = std::max(1, kTileRows / group);
  const auto tiles = attention_tiles(sequences, kv.kv_heads, tokens_per_tile);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    SoftmaxTile softmax(tokens_per_tile * group, kv.head_dim, kv.block_size);
#pragma omp for schedule(dynamic)
    for (size_t t = 0; t < tiles.size(); ++t) {
      const AttentionTile& tile = tiles[t];
      const int64_t first_head = int64_t{tile.kv_head} * group * kv.head_dim;
      softmax.clear();
      for (int token = 0; token < tile.token_count; ++token)
        for (int head = 0; head < group; ++head)
          softmax.add_row(queries.at(tile.first_token + token) + first_head + head * kv.head_dim);
      // Tokens the tile's first query sees; each further one sees one more.
      const int32_t after = sequences.query_starts[tile.sequence + 1] - tile.first_token;
      const int32_t first_seen = sequences.context_lens[tile.sequence] - after + 1;
      const int32_t seen = first_seen + tile.token_count - 1;
      const int32_t* table = sequences.block_tables + tile.sequence * sequences.table_stride;
      for (int32_t start = 0; start < seen; start += kv.block_size) {
        const int32_t block = table[start / kv.block_size];
        softmax.take_block(kv.keys(block, tile.kv_head), kv.values(block, tile.kv_head),
                           std::min(kv.block_size, seen - start), scale,
                           [&](int row) { return first_seen + row / group - start; });
      }
      for (int row = 0; row < tile.token_count * group; ++row)
        softmax.write_row(row, out + int64_t{tile.first_token + row / group} * heads * kv.head_dim +
                                   first_head + int64_t{row % group} * kv.head_dim);
    }
  }
}

}  // namespace epd
