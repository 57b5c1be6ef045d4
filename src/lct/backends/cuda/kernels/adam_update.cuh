// The arithmetic of Adam and AdamW: the parameter and its two moments.
#define TENSORS 3

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
struct Update {
    float beta1, beta2, eps, decay, step_size, correction, scale;
    float share, square_share;  // ROUNDING 0: of the two moments' averages
    bool from_grad;

    __device__ __forceinline__ Update(const StepArgs& s)
        : beta1(s.beta1), beta2(s.beta2), eps(s.eps), scale(s.grad_scale ? *s.grad_scale : 1.0f) {
#if ROUNDING == 0
        decay = DECOUPLED_DECAY ? s.param_share : s.weight_decay;
        step_size = s.step_size;
        correction = s.correction;
        square_share = s.square_share;
        // Torch's lerp starts from the nearer end: m + w * (g - m), or g - (1 - w) * (g - m).
        from_grad = fabsf(s.grad_share) >= 0.5f;
        share = from_grad ? -__fsub_rn(1.0f, s.grad_share) : s.grad_share;  // -0 where beta1 is 0
#else
        // Torch's kernel is given doubles and rounds them to float before it computes with them: powers are float's.
        decay = DECOUPLED_DECAY ? -__fmul_rn(s.lr, s.weight_decay) : s.weight_decay;
        step_size = __fdiv_rn(s.lr, __fsub_rn(1.0f, powf(beta1, *s.step)));
        correction = __fsqrt_rn(__fsub_rn(1.0f, powf(beta2, *s.step)));
#endif
    }

    // Two values, packed: parameter and moments are replaced.
    __device__ __forceinline__ void operator()(u32 (&values)[TENSORS], u32 grad) const {
        float2 p = unpack2(values[0]), m = unpack2(values[1]), v = unpack2(values[2]);
        float2 g = gradient(unpack2(grad), scale);
#if L2_DECAY
        g = round_op(fma2(decay, p, g));
#endif
#if ROUNDING == 0
#if DECOUPLED_DECAY
        p = round_op(mul2(decay, p));
#endif
        const float2 way = make_float2(__fsub_rn(g.x, m.x), __fsub_rn(g.y, m.y));
        m = round_op(fma2(share, way, from_grad ? g : m));
        v = round_op(mul2(beta2, v));
        // Torch's addcmul contracts the square itself where its factor is 1.
        v = round_op(square_share == 1.0f ? make_float2(__fmaf_rn(g.x, g.x, v.x), __fmaf_rn(g.y, g.y, v.y))
                                          : fma2(square_share, square2(g), v));
        float2 root = round_op(sqrt2(v));
        root = round_op(RECIPROCAL ? mul2(correction, root) : div2(root, correction));
        root = round_op(make_float2(__fadd_rn(root.x, eps), __fadd_rn(root.y, eps)));
        p = fma2(step_size, make_float2(__fdiv_rn(m.x, root.x), __fdiv_rn(m.y, root.y)), p);
#else
#if DECOUPLED_DECAY
        p = fma2(decay, p, p);
#endif
        m = fma2(beta1, m, fma2(-beta1, g, g));
        v = fma2(beta2, v, fma2(-beta2, square2(g), square2(g)));
        float2 root = div2(sqrt2(v), correction);
        root = make_float2(__fadd_rn(root.x, eps), __fadd_rn(root.y, eps));
        const float2 move = mul2(step_size, m);
        p = make_float2(__fsub_rn(p.x, __fdiv_rn(move.x, root.x)), __fsub_rn(p.y, __fdiv_rn(move.y, root.y)));
#endif
        values[0] = pack2(p);
        values[1] = pack2(m);
        values[2] = pack2(v);
    }

  private:
    __device__ __forceinline__ static float2 square2(float2 a) {
        return make_float2(__fmul_rn(a.x, a.x), __fmul_rn(a.y, a.y));
    }
    __device__ __forceinline__ static float2 sqrt2(float2 a) { return make_float2(__fsqrt_rn(a.x), __fsqrt_rn(a.y)); }
};
