// One SIMD register of floats, in the compiler's portable vector extension: the same source becomes
// AVX-512, AVX2 or NEON by the -march flag.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace epd {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntLanes __attribute__((vector_size(kLanes * sizeof(int32_t))));

inline Lanes load(const float* from) {  // any alignment
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof lanes); }

// The first `count` floats, zeros behind: reads nothing past them.
inline Lanes load_part(const float* from, int count) {
  Lanes lanes{};
  std::memcpy(&lanes, from, count * sizeof(float));
  return lanes;
}

namespace detail {

// One level of the reduction tree: lanes of `a` and `b` at distance kStep are added and interleaved.
constexpr int shuffle_index(int lane, int step, bool upper) {
  const int source = (lane / step) % 2 == 0 ? 0 : kLanes;
  return source + lane / (2 * step) * (2 * step) + lane % step + (upper ? step : 0);
}

template <int kStep, size_t... kLane>
inline Lanes add_pairs(Lanes a, Lanes b, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(a, b, shuffle_index(kLane, kStep, false)...) +
         __builtin_shufflevector(a, b, shuffle_index(kLane, kStep, true)...);
}

template <int kStep>
inline Lanes sum_tree(const Lanes* sums) {
  if constexpr (kStep == 0) {
    return sums[0];
  } else {
    return add_pairs<kStep>(sum_tree<kStep / 2>(sums), sum_tree<kStep / 2>(sums + kStep),
                            std::make_index_sequence<kLanes>());
  }
}

}  // namespace detail

// Lane i of the result is the sum over the lanes of sums[i]; kLanes sums in, one vector out.
inline Lanes sum_each(const Lanes* sums) { return detail::sum_tree<kLanes / 2>(sums); }

inline float sum_lanes(Lanes lanes) {
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int lane = 0; lane < step; ++lane) lanes[lane] += lanes[lane + step];
  return lanes[0];
}

inline float max_lane(Lanes lanes) {
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int lane = 0; lane < step; ++lane)
      lanes[lane] = lanes[lane] > lanes[lane + step] ? lanes[lane] : lanes[lane + step];
  return lanes[0];
}

// e^x to about 2 units in the last place; below -87 it is the smallest normal number, never zero.
inline Lanes exp_each(Lanes x) {
  const Lanes low = Lanes{} - 87.0f, high = Lanes{} + 88.0f;
  x = x < low ? low : x;
  x = x > high ? high : x;
  // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low mantissa bits.
  const Lanes magic = Lanes{} + 12582912.0f;
  const Lanes shifted = x * 1.44269504088896341f + magic;
  const Lanes power = shifted - magic;
  Lanes rest = x - power * 0.693359375f;  // ln 2 in two parts, the first exact times any power
  rest = rest + power * 2.12194440e-4f;
  Lanes sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  IntLanes bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  IntLanes exponent = ((bits & 0x7fffff) - 0x400000 + 127) << 23;
  Lanes scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return sum * scale;
}

}  // namespace epd
