// The arithmetic of SGD with momentum: the parameter and its momentum buffer.
#define TENSORS 2

// Mirrors steps.SgdArgs (ctypes).
struct StepArgs {
    Args tensors[TENSORS];
    void* grad;
    const float* grad_scale;                           // or null; ROUNDING 1 only
    const float* found_inf;                            // or null: 1 skips the step
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
        g = gradient(g, scale);
#if DECAY
        g = round_op(fma2(weight_decay, w, g));
#endif
        b = round_op(mul2(momentum, b));
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
};
