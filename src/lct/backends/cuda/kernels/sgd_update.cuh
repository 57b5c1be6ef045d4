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

    // Packed values: parameter and buffer are replaced.
    __device__ __forceinline__ void operator()(u32 (&values)[TENSORS][4], const u32 (&grad)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++)
            two(values[0][i], values[1][i], grad[i]);
    }

  private:
    __device__ __forceinline__ void two(u32& param, u32& buffer, u32 grad) const {
        float2 w = unpack2(param), g = unpack2(grad), b = unpack2(buffer);
        g = gradient(g, scale);
#if DECAY
        g = round_op(fma2(weight_decay, w, g));
#endif
        b = round_op(mul2(momentum, b));
        b = fma2(dampening_left, g, b);
        buffer = pack2(b);
#if ROUNDING == 0
        b = unpack2(buffer);
#endif
#if NESTEROV
        g = round_op(fma2(momentum, b, g));
#else
        g = b;
#endif
        param = pack2(fma2(lr, g, w));
    }
};
