// One decoder layer of the Llama shape: RMS norm, rotary attention with grouped heads, gated SiLU.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

namespace epd {

// Weights as torch stores them, [out, in]; a null bias means none.
struct LayerWeights {
  const float* input_norm;
  const float* qkv;         // query, key and value projections behind one another
  const float* qkv_bias;
  const float* output;
  const float* output_bias;
  const float* mlp_norm;
  const float* gate_up;     // gate, then up projection
  const float* down;
};

struct LayerShape {
  int32_t hidden;
  int32_t intermediate;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  float norm_eps;
  float scale;

  int64_t qkv_width() const { return int64_t{heads + 2 * kv_heads} * head_dim; }
};

// What the two halves of a layer share. scratch has scratch_floats(); hidden is [tokens, hidden].
struct LayerCall {
  const LayerWeights* weights;
  const LayerShape* shape;
  float* hidden;
  float* scratch;
  int32_t tokens;
  int32_t threads;
};

// hidden += attention(norm(hidden)). cosine and sine [tokens, head_dim] are the tokens' positions.
// The tokens' KV is final in `kv` on return.
inline void attention_half(const LayerCall& call, const float* cosine, const float* sine,
                           const PagedKv& kv, const Sequences& sequences) {
  const LayerWeights& weights = *call.weights;
  const LayerShape& shape = *call.shape;
  const int tokens = call.tokens, threads = call.threads;
  const int64_t query_width = int64_t{shape.heads} * shape.head_dim;
  const int64_t kv_width = int64_t{shape.kv_heads} * shape.head_dim;
  const int64_t qkv_width = shape.qkv_width();
  float* normed = call.scratch;                          // [tokens, hidden]
  float* qkv = normed + tokens * int64_t{shape.hidden};  // [tokens, qkv_width]
  float* attended = qkv + tokens * qkv_width;            // [tokens, query_width]

  rms_norm(call.hidden, weights.input_norm, normed, tokens, shape.hidden, shape.norm_eps, threads);
  linear(normed, tokens, weights.qkv, static_cast<int>(qkv_width), shape.hidden,
         {qkv, weights.qkv_bias, false}, threads);
  for (int64_t token = 0; token < tokens; ++token)  // queries and keys are neighbours
    rotate(qkv + token * qkv_width, shape.heads + shape.kv_heads, shape.head_dim,
           cosine + token * shape.head_dim, sine + token * shape.head_dim);
  const float* keys = qkv + query_width;
  write_kv({keys, qkv_width}, {keys + kv_width, qkv_width}, kv, sequences.slots, tokens);
  paged_attention({qkv, qkv_width}, attended, shape.heads, kv, sequences, shape.scale, threads);
  linear(attended, tokens, weights.output, shape.hidden, query_width,
         {call.hidden, weights.output_bias, true}, threads);
}

// hidden += mlp(norm(hidden)).
inline void mlp_half(const LayerCall& call) {
  const LayerWeights& weights = *call.weights;
  const LayerShape& shape = *call.shape;
  const int tokens = call.tokens, threads = call.threads;
  float* normed = call.scratch;                              // [tokens, hidden]
  float* gate_up = normed + tokens * int64_t{shape.hidden};  // [tokens, 2 * intermediate]
  float* gated = gate_up + tokens * 2 * int64_t{shape.intermediate};

  rms_norm(call.hidden, weights.mlp_norm, normed, tokens, shape.hidden, shape.norm_eps, threads);
  linear(normed, tokens, weights.gate_up, 2 * shape.intermediate, shape.hidden,
         {gate_up, nullptr, false}, threads);
  silu_times(gate_up, gated, tokens, shape.intermediate, threads);
  linear(gated, tokens, weights.down, shape.hidden, shape.intermediate,
         {call.hidden, nullptr, true}, threads);
}

inline int64_t scratch_floats(const LayerShape& shape, int64_t tokens) {
  const int64_t attention = shape.qkv_width() + int64_t{shape.heads} * shape.head_dim;
  const int64_t mlp = 3 * int64_t{shape.intermediate};
  return tokens * (shape.hidden + std::max(attention, mlp));
}

}  // namespace epd
