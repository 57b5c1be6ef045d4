// The arithmetic of SGD with momentum. Mirrors steps.StepArgs (ctypes).
struct StepArgs {
    Args param, state;
    void* grad;
    const float* grad_scale;  // or null; ROUNDING 1 only
    const float* found_inf;   // or null: a value other than 0 skips the step
    double lr, momentum, dampening_left, weight_decay;  // dampening_left = 1 - dampening
    u32 nesterov, maximize;
};

__device__ __forceinline__ float round_bf16(float x) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(out) : "f"(x));
    return __uint_as_float(out << 16);
}

struct Update {
#if ROUNDING == 0
    float lr, momentum, dampening_left, weight_decay;
    bool nesterov, maximize;

    __device__ __forceinline__ Update(const StepArgs& s)
        : lr(-(float)s.lr), momentum((float)s.momentum), dampening_left((float)s.dampening_left),
          weight_decay((float)s.weight_decay), nesterov(s.nesterov), maximize(s.maximize) {}

    __device__ __forceinline__ void one(float& p, float& m, float g) const {
        if (maximize) g = round_bf16(-g);
        if (weight_decay != 0.0f) g = round_bf16(__fmaf_rn(weight_decay, p, g));
        m = round_bf16(__fmul_rn(m, momentum));
        m = round_bf16(__fmaf_rn(dampening_left, g, m));
        if (nesterov) g = round_bf16(__fmaf_rn(momentum, m, g));
        else g = m;
        p = __fmaf_rn(lr, g, p);
    }
#else
    float lr, momentum, dampening_left, weight_decay, scale;
    bool nesterov, maximize, scaled;

    __device__ __forceinline__ Update(const StepArgs& s)
        : lr(-(float)s.lr), momentum((float)s.momentum), dampening_left((float)s.dampening_left),
          weight_decay((float)s.weight_decay), scale(s.grad_scale ? *s.grad_scale : 1.0f), nesterov(s.nesterov),
          maximize(s.maximize), scaled(s.grad_scale) {}

    __device__ __forceinline__ void one(float& p, float& m, float g) const {
        if (scaled) g = __fdiv_rn(g, scale);
        if (maximize) g = -g;
        if (weight_decay != 0.0f) g = __fmaf_rn(weight_decay, p, g);
        m = __fmaf_rn(dampening_left, g, __fmul_rn(momentum, m));
        if (nesterov) g = __fmaf_rn(momentum, m, g);
        else g = m;
        p = __fmaf_rn(lr, g, p);
    }
#endif
    __device__ __forceinline__ void operator()(float2& p, float2& m, float2 g) const {
        one(p.x, m.x, g.x);
        one(p.y, m.y, g.y);
    }
};
