// The arithmetic of Adam and AdamW: the parameter and its two moments.
#define TENSORS 3
// Pairs of values that are stepped side by side: more hide each other's latency, and take registers.
#define PAIRS_AT_ONCE 1

// Mirrors steps.AdamArgs (ctypes).
struct StepArgs {
    Args tensors[TENSORS];
    void* grad;
    const float* grad_scale;  // or null; ROUNDING 1 only
    const float* found_inf;   // or null: 1 skips the step
    const float* step;        // ROUNDING 1: the count of steps, this one included
    float lr, beta1, beta2, weight_decay, eps;
    // ROUNDING 0, computed on the host in double, as torch does: 1 - beta1, 1 - beta2, 1 - lr * weight_decay,
    // -lr / (1 - beta1^step), and sqrt(1 - beta2^step) or (RECIPROCAL) one over it.
    float grad_share, square_share, param_share, step_size, correction;
};

// Sums of products are spelled out, so that the compiler contracts what nvcc contracted in torch's kernels (read from
// their machine code for sm_90 in torch 2.11) and nothing else. Divisions and roots are rounded to nearest there.
//
// The compiler's own divisions and roots test their operands and branch, each by itself, one after the other. So eight
// values are first stepped by `quick`, which takes short sequences that are right where all exponents are moderate and
// says where they are not; `exact` steps them then.
struct Update {
    float beta1, beta2, eps, decay, step_size, correction, scale;
    float share, square_share;  // ROUNDING 0: of the two moments' averages
    float factor;  // of roots in `quick`: RECIPROCAL: the correction, else one over it; NaN: always `exact`
    bool from_grad;

    __device__ __forceinline__ Update(const StepArgs& s)
        : beta1(s.beta1), beta2(s.beta2), eps(s.eps), scale(s.grad_scale ? *s.grad_scale : 1.0f) {
        bool usual = true;
#if ROUNDING == 0
        decay = DECOUPLED_DECAY ? s.param_share : s.weight_decay;
        step_size = s.step_size;
        correction = s.correction;
        square_share = s.square_share;
        // Torch's lerp starts from the nearer end: m + w * (g - m), or g - (1 - w) * (g - m).
        from_grad = fabsf(s.grad_share) >= 0.5f;
        share = from_grad ? -__fsub_rn(1.0f, s.grad_share) : s.grad_share;  // -0 where beta1 is 0
        usual = !from_grad && square_share != 1.0f;
#else
        // Torch's kernel is given doubles and rounds them to float before it computes with them: powers are float's.
        decay = DECOUPLED_DECAY ? -__fmul_rn(s.lr, s.weight_decay) : s.weight_decay;
        step_size = __fdiv_rn(s.lr, __fsub_rn(1.0f, powf(beta1, *s.step)));
        correction = __fsqrt_rn(__fsub_rn(1.0f, powf(beta2, *s.step)));
#endif
        usual = usual && correction >= 0x1p-16f && correction <= 0x1p16f;
        factor = !usual ? __int_as_float(0x7fffffff) : RECIPROCAL ? correction : __frcp_rn(correction);
    }

    // Packed values: parameter and moments are replaced.
    __device__ __forceinline__ void operator()(u32 (&values)[TENSORS][4], const u32 (&grad)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; i += PAIRS_AT_ONCE)
            step(values, grad, i);
    }

  private:
    __device__ __forceinline__ void step(u32 (&values)[TENSORS][4], const u32 (&grad)[4], int from) const {
        u32 p[PAIRS_AT_ONCE], m[PAIRS_AT_ONCE], v[PAIRS_AT_ONCE], extreme = 0;
#pragma unroll
        for (int i = 0; i < PAIRS_AT_ONCE; i++) {
            p[i] = values[0][from + i], m[i] = values[1][from + i], v[i] = values[2][from + i];
            extreme |= quick(p[i], m[i], v[i], grad[from + i]);
        }
        if (UNLIKELY(extreme)) {
#pragma unroll
            for (int i = 0; i < PAIRS_AT_ONCE; i++) {
                p[i] = values[0][from + i], m[i] = values[1][from + i], v[i] = values[2][from + i];
                exact(p[i], m[i], v[i], grad[from + i]);
            }
        }
#pragma unroll
        for (int i = 0; i < PAIRS_AT_ONCE; i++)
            values[0][from + i] = p[i], values[1][from + i] = m[i], values[2][from + i] = v[i];
    }

    // Two values. Not 0 where their exponents are not moderate: what it left is of no account then.
    __device__ __forceinline__ u32 quick(u32& param, u32& first, u32& second, u32 grad) const {
        float2 p = unpack2(param), m = unpack2(first), v = unpack2(second), g = decayed(p, grad);
#if ROUNDING == 0
        const float2 way = make_float2(__fsub_rn(g.x, m.x), __fsub_rn(g.y, m.y));
        m = round_op(fma2(share, way, m));
        v = round_op(fma2(square_share, square2(g), round_op(mul2(beta2, v))));
        const float2 dividend = m;
#else
        moments(m, v, g);
        const float2 dividend = mul2(step_size, m);
#endif
        float2 root = round_op(make_float2(quick_root(v.x), quick_root(v.y)));
        u32 extreme = is_extreme(root, 64);
        root = round_op(RECIPROCAL ? mul2(factor, root)
                                   : make_float2(corrected(root.x, correction, __fmul_rn(root.x, factor), factor),
                                                 corrected(root.y, correction, __fmul_rn(root.y, factor), factor)));
        root = round_op(make_float2(__fadd_rn(root.x, eps), __fadd_rn(root.y, eps)));
        extreme |= is_extreme(dividend, 64) | is_extreme(root, 32);
        const float2 move = make_float2(quick_quotient(dividend.x, root.x), quick_quotient(dividend.y, root.y));
        param = pack2(moved(p, move));
        first = pack2(m);
        second = pack2(v);
        return extreme;
    }

    // Two values of any kind.
    __device__ __forceinline__ void exact(u32& param, u32& first, u32& second, u32 grad) const {
        float2 p = unpack2(param), m = unpack2(first), v = unpack2(second), g = decayed(p, grad);
#if ROUNDING == 0
        const float2 way = make_float2(__fsub_rn(g.x, m.x), __fsub_rn(g.y, m.y));
        m = round_op(fma2(share, way, from_grad ? g : m));
        v = round_op(mul2(beta2, v));
        // Torch's addcmul contracts the square itself where its factor is 1.
        v = round_op(square_share == 1.0f ? make_float2(__fmaf_rn(g.x, g.x, v.x), __fmaf_rn(g.y, g.y, v.y))
                                          : fma2(square_share, square2(g), v));
        const float2 dividend = m;
#else
        moments(m, v, g);
        const float2 dividend = mul2(step_size, m);
#endif
        float2 root = round_op(make_float2(__fsqrt_rn(v.x), __fsqrt_rn(v.y)));
        root = round_op(RECIPROCAL ? mul2(correction, root) : div2(root, correction));
        root = round_op(make_float2(__fadd_rn(root.x, eps), __fadd_rn(root.y, eps)));
        param = pack2(moved(p, make_float2(__fdiv_rn(dividend.x, root.x), __fdiv_rn(dividend.y, root.y))));
        first = pack2(m);
        second = pack2(v);
    }

    // The gradient as the moments take it; the parameter decays.
    __device__ __forceinline__ float2 decayed(float2& p, u32 grad) const {
        float2 g = gradient(unpack2(grad), scale);
#if L2_DECAY
        g = round_op(fma2(decay, p, g));
#elif DECOUPLED_DECAY && ROUNDING == 0
        p = round_op(mul2(decay, p));
#elif DECOUPLED_DECAY
        p = fma2(decay, p, p);
#endif
        return g;
    }

#if ROUNDING != 0
    __device__ __forceinline__ void moments(float2& m, float2& v, float2 g) const {
        m = fma2(beta1, m, fma2(-beta1, g, g));
        v = fma2(beta2, v, fma2(-beta2, square2(g), square2(g)));
    }
#endif

    __device__ __forceinline__ float2 moved(float2 p, float2 move) const {
#if ROUNDING == 0
        return fma2(step_size, move, p);
#else
        return make_float2(__fsub_rn(p.x, move.x), __fsub_rn(p.y, move.y));
#endif
    }

    __device__ __forceinline__ static float2 square2(float2 a) {
        return make_float2(__fmul_rn(a.x, a.x), __fmul_rn(a.y, a.y));
    }

    // Not 0 where one of two values does not lie between 2^-reach and 2^reach; reach is 32 or 64.
    __device__ __forceinline__ static u32 is_extreme(float2 a, u32 reach) {
        u32 both = __byte_perm(__float_as_uint(a.x), __float_as_uint(a.y), 0x7632) & EXPONENTS;
        // Exponents from 128 - reach to 127 + reach come to lie in the 128 (64) numbers from 128 on.
        both += reach << 7 | reach << 23;
        return (both ^ 0x40004000u) & (reach == 64 ? 0xc000c000u : 0xe000e000u);
    }

    // sqrt(v), rounded to nearest. ROUNDING 0: as that is rounded to BF16 afterwards. The root of a BF16 number is at
    // least 2^-19 of its size away from the middle of two BF16 numbers, because the square of such a middle has an odd
    // 18th bit; the approximation is within 2^-22. Else as the compiler does it.
    __device__ __forceinline__ static float quick_root(float v) {
#if ROUNDING == 0
        float root;
        asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(v));
        return root;
#else
        float inverse;
        asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(v));
        float root = __fmul_rn(v, inverse);
        return __fmaf_rn(__fmaf_rn(-root, root, v), __fmul_rn(0.5f, inverse), root);
#endif
    }

    // a / b, rounded to nearest. ROUNDING 0: both are BF16 numbers. No quotient of such is nearer than 2^-33 of its
    // size to the middle of two floats, the remainder is exact, and what it corrects the quotient to is within 2^-45
    // before it is rounded. Else as the compiler does it.
    __device__ __forceinline__ static float quick_quotient(float a, float b) {
        float inverse;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
#if ROUNDING != 0
        inverse = __fmaf_rn(inverse, __fmaf_rn(-b, inverse, 1.0f), inverse);
#endif
        return corrected(a, b, __fmul_rn(a, inverse), inverse);
    }
    // A quotient a / b with its remainder's share. `inverse`: one over b.
    __device__ __forceinline__ static float corrected(float a, float b, float quotient, float inverse) {
        return __fmaf_rn(__fmaf_rn(-b, quotient, a), inverse, quotient);
    }
};
