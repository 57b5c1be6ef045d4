// What the updates of all optimizers share: two values at a time, in FP32.
//
// ROUNDING 0: every operation rounds to BF16, as torch's foreach and single-tensor paths do. ROUNDING 1: torch's
// fused path stays in FP32 and rounds its results once. SCALED, MAXIMIZE: 1 where torch's option is on.
__device__ __forceinline__ float2 round_op(float2 v) { return ROUNDING == 0 ? unpack2(pack2(v)) : v; }
__device__ __forceinline__ float2 fma2(float a, float2 b, float2 c) {
    return make_float2(__fmaf_rn(a, b.x, c.x), __fmaf_rn(a, b.y, c.y));
}
__device__ __forceinline__ float2 mul2(float a, float2 b) { return make_float2(__fmul_rn(a, b.x), __fmul_rn(a, b.y)); }
__device__ __forceinline__ float2 div2(float2 a, float b) { return make_float2(__fdiv_rn(a.x, b), __fdiv_rn(a.y, b)); }

// The gradient as the update takes it.
__device__ __forceinline__ float2 gradient(float2 g, float scale) {
#if SCALED
    g = div2(g, scale);
#endif
#if MAXIMIZE
    g = make_float2(-g.x, -g.y);
    g = round_op(g);
#endif
    return g;
}
