/* What the kernels share: how they take arrays from Python, and which vectors this processor has. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(__GNUC__) && !defined(__clang__)
#error "the kernels need the vector types of GCC or Clang; without them the engine goes its other ways"
#endif
#define INLINE static inline __attribute__((always_inline))

/* Where the compiler can write for other processors than its own, kernels are compiled for three and chosen between. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CHOICES 1
#define CHOOSE(lanes, what, ...)                          \
    ((lanes) == 16  ? what##_avx512(__VA_ARGS__)          \
     : (lanes) == 8 ? what##_avx2(__VA_ARGS__)            \
                    : what##_any(__VA_ARGS__))
#else
#define CHOOSE(lanes, what, ...) ((void)(lanes), what##_any(__VA_ARGS__))
#endif

/* The numbers of two vectors at these places, of which the compilers speak differently. */
#ifdef __clang__
#define SHUFFLE(a, b, type, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, type, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

/* How many numbers a vector holds here: 16 with AVX-512, 8 with AVX2, or else 4. */
INLINE int lanes_here(void) {
#ifdef CHOICES
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return 16;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 8;
#endif
    return 4;
}

/* The numbers of an array of these sizes, whose length is so made sure of; NULL with an error set if it is another. */
INLINE float *numbers(PyObject *given, Py_buffer *view, const char *name, int writable, int dimensions,
                      const long *sizes) {
    if (PyObject_GetBuffer(given, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0))) {
        view->obj = NULL;
        return NULL;
    }
    int right = view->ndim == dimensions && view->format && !strcmp(view->format, "f");
    for (int i = 0; right && i < dimensions; i++) right = sizes[i] < 0 || view->shape[i] == sizes[i];
    if (right) return view->buf;
    PyErr_Format(PyExc_ValueError, "%s must be of float32 and have the sizes that go with the rest", name);
    return NULL;
}
