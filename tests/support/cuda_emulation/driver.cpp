// libcuda.so.1 for runtime.cpp: what torch asks a driver for before it uses the runtime.
#define API extern "C" __attribute__((visibility("default")))

API int cuInit(unsigned) { return 0; }
API int cuDevicePrimaryCtxGetState(int, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return 0;
}
API int cuGetErrorString(int, const char **text) {
    *text = "emulated";
    return 0;
}
