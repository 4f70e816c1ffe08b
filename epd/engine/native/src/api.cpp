// The C interface that epd/engine/native/library.py binds; structs mirror its ctypes classes.
#include "decoder_layer.h"

using namespace epd;

extern "C" {

// Floats per SIMD register: head_dim must be a multiple of it.
int32_t epd_lanes() { return kLanes; }

void epd_write_kv(const float* keys, const float* values, const PagedKv* kv, const int64_t* slots,
                  int32_t tokens) {
  const int64_t width = int64_t{kv->kv_heads} * kv->head_dim;
  write_kv({keys, width}, {values, width}, *kv, slots, tokens);
}

void epd_paged_attention(const float* queries, float* out, int32_t heads, const PagedKv* kv,
                         const Sequences* sequences, float scale, int32_t threads) {
  paged_attention({queries, int64_t{heads} * kv->head_dim}, out, heads, *kv, *sequences, scale,
                  threads);
}

void epd_linear(const float* x, int32_t rows, const float* weight, int32_t columns, int64_t dim,
                float* out, int32_t threads) {
  linear(x, rows, weight, columns, dim, {out, nullptr, false}, threads);
}

void epd_rms_norm(const float* x, const float* weight, float* out, int32_t rows, int64_t dim,
                  float eps, int32_t threads) {
  rms_norm(x, weight, out, rows, dim, eps, threads);
}

int64_t epd_scratch_floats(const LayerShape* shape, int64_t tokens) {
  return scratch_floats(*shape, tokens);
}

void epd_attention_half(const LayerCall* call, const float* cosine, const float* sine,
                        const PagedKv* kv, const Sequences* sequences) {
  attention_half(*call, cosine, sine, *kv, *sequences);
}

void epd_mlp_half(const LayerCall* call) { mlp_half(*call); }

// All layers, for steps in which nobody waits for single ones; `call` comes without weights.
void epd_layers(const LayerCall* call, const LayerWeights* weights, const PagedKv* kv,
                int32_t count, const float* cosine, const float* sine,
                const Sequences* sequences) {
  LayerCall layer = *call;
  for (int32_t index = 0; index < count; ++index) {
    layer.weights = weights + index;
    attention_half(layer, cosine, sine, kv[index], *sequences);
    mlp_half(layer);
  }
}
}
