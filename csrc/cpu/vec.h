// SPDX-License-Identifier: Apache-2.0
// Sixteen lanes in as many registers as the instruction set needs. Included by one translation unit
// per instruction set, so all of it has internal linkage: an older CPU must never run newer code.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define EKV_WIDTH 16
#elif defined(__AVX2__)
#define EKV_WIDTH 8
#else
#define EKV_WIDTH 4
#endif

#define EKV_INLINE static inline __attribute__((always_inline))

namespace {

constexpr int kParts = 16 / EKV_WIDTH;

typedef float pf __attribute__((vector_size(4 * EKV_WIDTH)));
typedef int32_t pi __attribute__((vector_size(4 * EKV_WIDTH)));
typedef uint32_t pu __attribute__((vector_size(4 * EKV_WIDTH)));
typedef uint16_t ph __attribute__((vector_size(2 * EKV_WIDTH)));

struct vf {
  pf p[kParts];
};
struct vu {
  pu p[kParts];
};

#define EKV_EACH _Pragma("GCC unroll 4") for (int j = 0; j < kParts; ++j)

template <class T> EKV_INLINE T load_as(const void* from) {
  T value;
  memcpy(&value, from, sizeof value);
  return value;
}

EKV_INLINE vf set1(float x) {
  vf r;
  EKV_EACH r.p[j] = x - pf{};
  return r;
}
EKV_INLINE vu set1u(uint32_t x) {
  vu r;
  EKV_EACH r.p[j] = x + pu{};
  return r;
}
EKV_INLINE vf load(const float* from) {
  vf r;
  EKV_EACH r.p[j] = load_as<pf>(from + j * EKV_WIDTH);
  return r;
}
EKV_INLINE vu load_u32(const void* from) {
  vu r;
  EKV_EACH r.p[j] = load_as<pu>(static_cast<const char*>(from) + j * 4 * EKV_WIDTH);
  return r;
}
EKV_INLINE vu load_u16(const void* from) {
  vu r;
  EKV_EACH r.p[j] =
      __builtin_convertvector(load_as<ph>(static_cast<const char*>(from) + j * 2 * EKV_WIDTH), pu);
  return r;
}
EKV_INLINE void store(float* to, vf x) {
  EKV_EACH memcpy(to + j * EKV_WIDTH, &x.p[j], sizeof(pf));
}
EKV_INLINE void store_u16(void* to, vu x) {
  EKV_EACH {
    const ph low = __builtin_convertvector(x.p[j], ph);
    memcpy(static_cast<char*>(to) + j * 2 * EKV_WIDTH, &low, sizeof low);
  }
}

#define EKV_OPERATOR(type, op)                                                                     \
  EKV_INLINE type operator op(type a, type b) {                                                    \
    EKV_EACH a.p[j] = a.p[j] op b.p[j];                                                            \
    return a;                                                                                      \
  }
EKV_OPERATOR(vf, +)
EKV_OPERATOR(vf, -)
EKV_OPERATOR(vf, *)
EKV_OPERATOR(vf, /)
EKV_OPERATOR(vu, +)
EKV_OPERATOR(vu, -)
EKV_OPERATOR(vu, &)
EKV_OPERATOR(vu, |)
#undef EKV_OPERATOR

EKV_INLINE vu operator<<(vu a, int n) {
  EKV_EACH a.p[j] = a.p[j] << n;
  return a;
}
EKV_INLINE vu operator>>(vu a, int n) {
  EKV_EACH a.p[j] = a.p[j] >> n;
  return a;
}
EKV_INLINE vf fma(vf a, vf b, vf c) {
  EKV_EACH c.p[j] += a.p[j] * b.p[j]; // contracted where the CPU can
  return c;
}
EKV_INLINE vf max(vf a, vf b) {
  EKV_EACH a.p[j] = a.p[j] > b.p[j] ? a.p[j] : b.p[j];
  return a;
}
EKV_INLINE vf min(vf a, vf b) {
  EKV_EACH a.p[j] = a.p[j] < b.p[j] ? a.p[j] : b.p[j];
  return a;
}
// Where x < limit: a, else b.
EKV_INLINE vf where_less(vf x, vf limit, vf a, vf b) {
  EKV_EACH b.p[j] = x.p[j] < limit.p[j] ? a.p[j] : b.p[j];
  return b;
}
EKV_INLINE vf abs(vf a) {
  EKV_EACH a.p[j] = (pf)((pu)a.p[j] & 0x7fffffffu);
  return a;
}
EKV_INLINE vf as_float(vu a) {
  vf r;
  EKV_EACH r.p[j] = (pf)a.p[j];
  return r;
}
EKV_INLINE vu as_bits(vf a) {
  vu r;
  EKV_EACH r.p[j] = (pu)a.p[j];
  return r;
}
EKV_INLINE vf to_float(vu a) {
  vf r;
  EKV_EACH r.p[j] = __builtin_convertvector((pi)a.p[j], pf);
  return r;
}
EKV_INLINE vu to_int(vf a) {
  vu r;
  EKV_EACH r.p[j] = (pu) __builtin_convertvector(a.p[j], pi);
  return r;
}

// Halves on halves. Each instruction set has one order of additions, whatever is added.
#if EKV_WIDTH == 16
#define EKV_HALVES(fold)                                                                           \
  fold(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);                                      \
  fold(4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);                                      \
  fold(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);                                      \
  fold(1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#elif EKV_WIDTH == 8
#define EKV_HALVES(fold)                                                                           \
  fold(4, 5, 6, 7, 0, 1, 2, 3);                                                                    \
  fold(2, 3, 0, 1, 6, 7, 4, 5);                                                                    \
  fold(1, 0, 3, 2, 5, 4, 7, 6)
#else
#define EKV_HALVES(fold)                                                                           \
  fold(2, 3, 0, 1);                                                                                \
  fold(1, 0, 3, 2)
#endif

EKV_INLINE float sum(vf a) {
  pf x = a.p[0];
  for (int j = 1; j < kParts; ++j) x += a.p[j];
#define EKV_ADD(...) x += __builtin_shuffle(x, pi{__VA_ARGS__})
  EKV_HALVES(EKV_ADD);
#undef EKV_ADD
  return x[0];
}
EKV_INLINE float largest(vf a) {
  pf x = a.p[0];
  for (int j = 1; j < kParts; ++j) x = x > a.p[j] ? x : a.p[j];
#define EKV_MOST(...)                                                                              \
  {                                                                                                \
    const pf y = __builtin_shuffle(x, pi{__VA_ARGS__});                                            \
    x = x > y ? x : y;                                                                             \
  }
  EKV_HALVES(EKV_MOST);
#undef EKV_MOST
  return x[0];
}

// Nearest integer, ties to even, of |x| < 2^22.
EKV_INLINE vf rint(vf x) {
  const vf magic = set1(12582912.0f); // 1.5 * 2^23
  vf r = x + magic;
  for (int j = 0; j < kParts; ++j)
    __asm__("" : "+x"(r.p[j])); // keep the compiler from taking it away again
  return r - magic;
}

// exp(x) for x <= 0, to about 2 units in the last place; exactly 0 below -87, and so for -inf.
EKV_INLINE vf exp_negative(vf x) {
  const vf low = set1(-87.0f);
  const vf y = max(x, low);
  const vf n = rint(y * set1(1.44269504f));
  const vf r = fma(n, set1(1.42860677e-6f), fma(n, set1(-0.693145752f), y));
  vf p = set1(1.0f / 720);
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  const vf power = as_float((to_int(n) + set1u(127)) << 23);
  return where_less(x, low, set1(0.0f), p * power);
}
EKV_INLINE float exp_negative(float x) {
  float lanes[16];
  store(lanes, exp_negative(set1(x)));
  return lanes[0];
}

// 16 bit floats.
EKV_INLINE vf from_half(vu h) {
  const vf magnitude = as_float((h & set1u(0x7fff)) << 13) * set1(5.19229686e33f); // 2^112
  // Infinity and NaN have all exponent bits set in both formats.
  const vf special = as_float(((h & set1u(0x7fff)) << 13) | set1u(0x7f800000));
  const vf exponent = to_float(h & set1u(0x7c00));
  const vf value = where_less(exponent, set1(31744.0f), magnitude, special);
  return as_float(as_bits(value) | ((h & set1u(0x8000)) << 16));
}
EKV_INLINE vf from_bf16(vu h) {
  return as_float(h << 16);
}
EKV_INLINE vu to_bf16(vf x) {
  const vu bits = as_bits(x);
  const vu rounded = (bits + set1u(0x7fff) + ((bits >> 16) & set1u(1))) >> 16;
  const vu quiet = (bits >> 16) | set1u(0x40);
  vu r;
  EKV_EACH r.p[j] = x.p[j] == x.p[j] ? rounded.p[j] : quiet.p[j];
  return r;
}

EKV_INLINE float half_to_float(uint16_t h) {
  return static_cast<float>(load_as<_Float16>(&h));
}
EKV_INLINE uint16_t float_to_half(float x) {
  const _Float16 h = static_cast<_Float16>(x);
  return load_as<uint16_t>(&h);
}
// Sixteen elements of any type.
EKV_INLINE vf load_type(const uint8_t* from, int type) {
  if (type == entropykv::kFloat32) return load(reinterpret_cast<const float*>(from));
  const vu h = load_u16(from);
  return type == entropykv::kBFloat16 ? from_bf16(h) : from_half(h);
}
EKV_INLINE void store_type(uint8_t* to, vf x, int type) {
  if (type == entropykv::kFloat32) return store(reinterpret_cast<float*>(to), x);
  if (type == entropykv::kBFloat16) return store_u16(to, to_bf16(x));
  float lanes[16];
  store(lanes, x);
  for (int i = 0; i < 16; ++i) {
    const uint16_t h = float_to_half(lanes[i]);
    memcpy(to + 2 * i, &h, 2);
  }
}

} // namespace
