// The arithmetic of SGD with momentum: the parameter and its momentum buffer.
#define TENSORS 2

// Mirrors steps.SgdArgs (ctypes).
struct StepArgs {
    Args tensors[TENSORS];
    void* grad;
    const float* grad_scale;                           // or null; ROUNDING 1 only
    const float* found_inf;                            // or null: a value other than 0 skips the step
    float lr, momentum, dampening_left, weight_decay;  // dampening_left = 1 - dampening
};

// Options are compile-time constants: as run-time flags they cost a third of the arithmetic.
struct Update {
    float lr, momentum, dampening_left, weight_decay, scale;

    __device__ __forceinline__ Update(const StepArgs& s)
        : lr(-s.lr),
          momentum(s.momentum),
          dampening_left(s.dampening_left),
          weight_decay(s.weight_decay),
          scale(s.grad_scale ? *s.grad_scale : 1.0f) {}

    // Two values, packed: parameter and buffer are replaced.
    __device__ __forceinline__ void operator()(u32 (&values)[TENSORS], u32 grad) const {
        float2 w = unpack2(values[0]), g = unpack2(grad), b = unpack2(values[1]);
#if SCALED
        g = make_float2(__fdiv_rn(g.x, scale), __fdiv_rn(g.y, scale));
#endif
#if MAXIMIZE
        g = make_float2(-g.x, -g.y);
        g = round_op(g);
#endif
#if DECAY
        g = round_op(fma2(weight_decay, w, g));
#endif
        b = round_op(make_float2(__fmul_rn(b.x, momentum), __fmul_rn(b.y, momentum)));
        b = fma2(dampening_left, g, b);
        values[1] = pack2(b);
#if ROUNDING == 0
        b = unpack2(values[1]);
#endif
#if NESTEROV
        g = round_op(fma2(momentum, b, g));
#else
        g = b;
#endif
        values[0] = pack2(fma2(lr, g, w));
    }

  private:
    __device__ __forceinline__ static float2 fma2(float a, float2 b, float2 c) {
        return make_float2(__fmaf_rn(a, b.x, c.x), __fmaf_rn(a, b.y, c.y));
    }
    // After each operation of torch's foreach and single-tensor paths; the fused path stays in FP32.
    __device__ __forceinline__ static float2 round_op(float2 v) { return ROUNDING == 0 ? unpack2(pack2(v)) : v; }
};
