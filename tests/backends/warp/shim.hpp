// What kernels use of CUDA, for a C++ compiler and one warp a block: its lanes are fibers that take turns. A vote, a
// shuffle or a barrier hands over to the next lane, so that all lanes have come to it when the first one goes on.
#include <cmath>
#include <cstddef>
#include <cstring>
#include <ucontext.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    float x, y;
};
struct Index {
    unsigned x;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

static Index lane_index[32], blockIdx, blockDim = {32};
static unsigned now, turn[32], given[2][32];
static ucontext_t fibers[32], caller;
#define threadIdx (lane_index[now])
uint4 shared[8192];

inline void next_lane() {
    const unsigned lane = now;
    now = (lane + 1) % 32;
    swapcontext(&fibers[lane], &fibers[now]);
}
// What all lanes give. Two rounds have memory of their own: no lane is more than one ahead.
inline const unsigned* of_all(unsigned value) {
    unsigned* round = given[turn[now]++ % 2];
    round[now] = value;
    next_lane();
    return round;
}
inline void __syncwarp() { of_all(0); }
inline void __syncthreads() { of_all(0); }
inline unsigned __ballot_sync(unsigned, bool vote) {
    const unsigned* votes = of_all(vote);
    unsigned found = 0;
    for (int lane = 0; lane < 32; lane++)
        found |= votes[lane] << lane;
    return found;
}
inline bool __any_sync(unsigned mask, unsigned vote) { return __ballot_sync(mask, vote != 0) != 0; }
inline bool __all_sync(unsigned mask, unsigned vote) { return !__ballot_sync(mask, vote == 0); }
inline unsigned __shfl_sync(unsigned, unsigned value, unsigned lane) { return of_all(value)[lane % 32]; }
inline unsigned __shfl_xor_sync(unsigned, unsigned value, unsigned mask) {
    const unsigned* values = of_all(value);
    return values[now ^ mask];
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    const unsigned* values = of_all(value);
    unsigned sum = 0;
    for (int lane = 0; lane < 32; lane++)
        sum += values[lane];
    return sum;
}

inline unsigned __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return __builtin_ffs((int)v); }
inline unsigned shifted(unsigned low, unsigned high, unsigned by) {
    return (unsigned)((((unsigned long long)high << 32 | low) << by) >> 32);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) { return shifted(low, high, by & 31); }
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned by) {
    return shifted(low, high, by < 32 ? by : 32);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (by < 32 ? by : 32));
}
inline unsigned __dp2a_lo(unsigned a, unsigned b, unsigned sum) {
    return sum + (a & 0xffff) * (b & 255) + (a >> 16) * (b >> 8 & 255);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned chosen) {
    const unsigned long long bytes = (unsigned long long)high << 32 | low;
    unsigned out = 0;
    for (int i = 0; i < 4; i++)
        out |= (unsigned)(bytes >> (chosen >> 4 * i & 7) * 8 & 255) << 8 * i;
    return out;
}
inline float __uint_as_float(unsigned v) {
    float out;
    memcpy(&out, &v, 4);
    return out;
}
inline unsigned __float_as_uint(float v) {
    unsigned out;
    memcpy(&out, &v, 4);
    return out;
}
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fsqrt_rn(float v) { return sqrtf(v); }
inline float __frcp_rn(float v) { return 1 / v; }
inline float __int_as_float(int v) { return __uint_as_float(v); }
template <class T>
inline T min(T a, T b) {
    return a < b ? a : b;
}
template <class T>
inline T max(T a, T b) {
    return a > b ? a : b;
}
template <class T>
inline T __ldcs(const T* from) {
    return *from;
}
template <class T>
inline void __stcs(T* to, T value) {
    *to = value;
}
template <class T, class V>
inline T atomicAdd(T* at, V by) {
    T old = *at;
    *at += by;
    return old;
}
template <class T, class V>
inline T atomicSub(T* at, V by) {
    T old = *at;
    *at -= by;
    return old;
}
template <class T, class V>
inline T atomicOr(T* at, V bits) {
    T old = *at;
    *at |= bits;
    return old;
}
template <class T, class V>
inline T atomicAnd(T* at, V bits) {
    T old = *at;
    *at &= bits;
    return old;
}
inline void __threadfence() {}

// In place of instructions that approximate.
inline float sqrt_approx(float v) { return sqrtf(v); }
inline float rsqrt_approx(float v) { return 1 / sqrtf(v); }
inline float rcp_approx(float v) { return 1 / v; }

// In place of the functions of common.cuh and pooled.cuh that are written in assembly.
inline unsigned blend(unsigned a, unsigned b, unsigned mask) { return (a & ~mask) | (b & mask); }
inline void stage16(unsigned* to, const unsigned* from) { memcpy(to, from, 16); }
inline void stage_wait() {}
inline void prefetch(const void*, unsigned, unsigned) {}
inline void prefetch_at_once(const void*, unsigned, unsigned) {}
inline unsigned opaque(unsigned value) { return value; }
inline unsigned bfloat16(float v) {
    const unsigned bits = __float_as_uint(v);
    return v != v ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned pack2(float2 v) { return bfloat16(v.x) | bfloat16(v.y) << 16; }
inline unsigned shift_left(unsigned value, unsigned by) { return by < 32 ? value << by : 0; }
