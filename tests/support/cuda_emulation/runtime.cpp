// libcudart.so.13 for a machine without a GPU: device memory is heap, a stream is a thread.
//
// Real builds of torch for CUDA 13 run on it (operators.py does what their kernels would do). As
// on a device: streams run on their own, in order, with random delays; only events order them;
// memory is told apart by kind, a kernel that touches any other is an error that stays; a failed
// call's error is kept for the next check. Refusals are set by the environment:
//
//   EMULATED_COUNT_ERROR, EMULATED_DRIVER     cudaGetDeviceCount, version of the driver
//   EMULATED_DEVICE_BYTES                     memory of the device
//   EMULATED_PINNED_BYTES                     host memory that may be locked
//   EMULATED_REGISTER_ERROR                   cudaHostRegister
//   EMULATED_COPY_ERROR                       what emulated_fail_after() makes a copy fail with
//   EMULATED_DELAY_US, EMULATED_SEED          longest delay of an action, its random numbers
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

long setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value && *value ? atol(value) : otherwise;
}

// --- errors: the last one is kept by the thread, a lost device for good
thread_local cudaError_t last_error = cudaSuccess;
std::atomic<int> lost{0};

cudaError_t fail(cudaError_t error) {
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
    return error;
}
cudaError_t alive() { return fail(static_cast<cudaError_t>(lost.load())); }

// --- memory
enum Kind { DEVICE, PINNED, REGISTERED };
struct Range {
    size_t size;
    Kind kind;
};
std::mutex memory_lock;
std::map<uintptr_t, Range> ranges;
size_t device_used, pinned_used;

size_t device_bytes() { return setting("EMULATED_DEVICE_BYTES", 4L << 30); }

// The range that holds all of [address, address + size); null when none does.
const Range *range_of(const void *address, size_t size) {
    std::lock_guard<std::mutex> guard(memory_lock);
    auto at = reinterpret_cast<uintptr_t>(address);
    auto found = ranges.upper_bound(at);
    if (found == ranges.begin()) return nullptr;
    --found;
    return at + size <= found->first + found->second.size ? &found->second : nullptr;
}
bool on_device(const void *address, size_t size) {
    const Range *range = range_of(address, size);
    return range && range->kind == DEVICE;
}
bool may_lock(size_t size) {
    long limit = setting("EMULATED_PINNED_BYTES", -1);
    return limit < 0 || pinned_used + size <= static_cast<size_t>(limit);
}
void *take(size_t size, size_t alignment, unsigned char poison) {
    void *memory = aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    if (memory) memset(memory, poison, size);
    return memory;
}
// Removes the range that begins at `address`; its size, or 0 when it is not one of this kind.
size_t forget(void *address, Kind kind) {
    auto found = ranges.find(reinterpret_cast<uintptr_t>(address));
    if (found == ranges.end() || found->second.kind != kind) return 0;
    size_t size = found->second.size;
    ranges.erase(found);
    return size;
}

// --- streams and events
struct Event {
    std::mutex lock;
    std::condition_variable changed;
    long recorded = 0, done = 0;
    std::chrono::steady_clock::time_point at;

    void wait(long turn) {
        std::unique_lock<std::mutex> held(lock);
        while (done < turn && !lost.load()) changed.wait_for(held, std::chrono::milliseconds(5));
    }
};

class Stream {
  public:
    explicit Stream(int priority) : priority(priority), thread_([this] { run(); }) {}

    void put(std::function<void()> action) {
        {
            std::lock_guard<std::mutex> held(lock_);
            queue_.push_back(std::move(action));
        }
        changed_.notify_all();
    }
    bool idle() {
        std::lock_guard<std::mutex> held(lock_);
        return queue_.empty() && !busy_;
    }
    void wait() {
        std::unique_lock<std::mutex> held(lock_);
        changed_.wait(held, [this] { return queue_.empty() && !busy_; });
    }
    const int priority;

  private:
    void run() {
        std::mt19937 random(setting("EMULATED_SEED", 1));
        long delay = setting("EMULATED_DELAY_US", 200);
        for (;;) {
            std::function<void()> action;
            {
                std::unique_lock<std::mutex> held(lock_);
                changed_.wait(held, [this] { return !queue_.empty(); });
                action = std::move(queue_.front());
                queue_.pop_front();
                busy_ = true;
            }
            if (delay && random() % 4 == 0) usleep(random() % delay);
            if (!lost.load()) action();
            {
                std::lock_guard<std::mutex> held(lock_);
                busy_ = false;
            }
            changed_.notify_all();
        }
    }
    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> queue_;
    bool busy_ = false;
    std::thread thread_;
};

// Streams live as long as the process, as torch keeps its own.
std::mutex streams_lock;
std::vector<Stream *> &streams() {
    static auto *all = new std::vector<Stream *>;
    return *all;
}
Stream *new_stream(int priority) {
    auto *stream = new Stream(priority);
    std::lock_guard<std::mutex> guard(streams_lock);
    streams().push_back(stream);
    return stream;
}
Stream *stream_of(cudaStream_t handle) {
    static Stream *legacy = new_stream(0);
    return reinterpret_cast<uintptr_t>(handle) <= 2 ? legacy : reinterpret_cast<Stream *>(handle);
}

// --- a copy or launch to come that fails
std::atomic<long> until_failure{-1};

cudaError_t planned_failure() {
    if (until_failure.load() < 0 || until_failure.fetch_sub(1) != 0) return cudaSuccess;
    auto error = static_cast<cudaError_t>(setting("EMULATED_COPY_ERROR", cudaErrorUnknown));
    if (error == cudaErrorIllegalAddress) lost = error;
    return fail(error);
}

// --- the page kernels' arguments, as storage/transfer/kernels.py lays them out
struct PageGroup {
    unsigned long long payload[224];
    unsigned page[224];
};
struct Geometry {
    unsigned long long page_stride;
    unsigned row_words, first_plane, plane_count, page_count;
};
bool may_touch(const PageGroup &group, const Geometry &geometry, const void *planes, size_t word) {
    size_t row = geometry.row_words * word;
    auto *plane = static_cast<const unsigned long long *>(planes);
    if (!on_device(planes, (geometry.first_plane + geometry.plane_count) * sizeof *plane)) return false;
    for (unsigned i = 0; i < geometry.page_count; ++i) {
        auto payload = group.payload[i] + geometry.first_plane * row;
        if (!range_of(reinterpret_cast<void *>(payload), geometry.plane_count * row)) return false;
        for (unsigned p = 0; p < geometry.plane_count; ++p) {
            auto at = plane[geometry.first_plane + p] + group.page[i] * geometry.page_stride;
            if (!on_device(reinterpret_cast<void *>(at), row)) return false;
        }
    }
    return true;
}

}  // namespace

API cudaError_t cudaDeviceSynchronize() {
    std::vector<Stream *> all;
    {
        std::lock_guard<std::mutex> guard(streams_lock);
        all = streams();
    }
    for (Stream *stream : all) stream->wait();
    return alive();
}

API cudaError_t cudaMalloc(void **address, size_t size) {
    if (cudaError_t error = alive()) return error;
    std::lock_guard<std::mutex> guard(memory_lock);
    if (device_used + size > device_bytes()) return fail(cudaErrorMemoryAllocation);
    *address = take(size, 2 << 20, 0xDB);
    device_used += size;
    ranges[reinterpret_cast<uintptr_t>(*address)] = {size, DEVICE};
    return cudaSuccess;
}
API cudaError_t cudaFree(void *address) {
    if (!address) return cudaSuccess;
    cudaDeviceSynchronize();
    std::lock_guard<std::mutex> guard(memory_lock);
    size_t size = forget(address, DEVICE);
    if (!size) return fail(cudaErrorInvalidValue);
    device_used -= size;
    memset(address, 0xDD, size);
    free(address);
    return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void **address, size_t size, unsigned) {
    if (cudaError_t error = alive()) return error;
    std::lock_guard<std::mutex> guard(memory_lock);
    if (!may_lock(size)) return fail(cudaErrorMemoryAllocation);
    *address = take(size, 4096, 0xCB);
    pinned_used += size;
    ranges[reinterpret_cast<uintptr_t>(*address)] = {size, PINNED};
    return cudaSuccess;
}
API cudaError_t cudaFreeHost(void *address) {
    std::lock_guard<std::mutex> guard(memory_lock);
    size_t size = forget(address, PINNED);
    if (!size) return fail(cudaErrorInvalidValue);
    pinned_used -= size;
    free(address);
    return cudaSuccess;
}
API cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags) {
    if (cudaError_t error = alive()) return error;
    if (!address || !size || flags > 0x0f) return fail(cudaErrorInvalidValue);
    if (long error = setting("EMULATED_REGISTER_ERROR", 0)) return fail(static_cast<cudaError_t>(error));
    std::lock_guard<std::mutex> guard(memory_lock);
    auto at = reinterpret_cast<uintptr_t>(address);
    auto next = ranges.lower_bound(at + size);
    if (next != ranges.begin()) {
        --next;
        if (next->first + next->second.size > at) return fail(cudaErrorHostMemoryAlreadyRegistered);
    }
    if (!may_lock(size)) return fail(cudaErrorMemoryAllocation);
    pinned_used += size;
    ranges[at] = {size, REGISTERED};
    return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void *address) {
    cudaDeviceSynchronize();
    std::lock_guard<std::mutex> guard(memory_lock);
    size_t size = forget(address, REGISTERED);
    if (!size) return fail(cudaErrorHostMemoryNotRegistered);
    pinned_used -= size;
    return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *address) {
    memset(found, 0, sizeof *found);
    const Range *range = range_of(address, 1);
    found->type = !range                 ? cudaMemoryTypeUnregistered
                  : range->kind == DEVICE ? cudaMemoryTypeDevice
                                          : cudaMemoryTypeHost;
    found->devicePointer = range ? const_cast<void *>(address) : nullptr;
    found->hostPointer = range && range->kind == DEVICE ? nullptr : const_cast<void *>(address);
    return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = device_bytes();
    *free_bytes = *total - device_used;
    return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned, int priority) {
    if (cudaError_t error = alive()) return error;
    *handle = reinterpret_cast<cudaStream_t>(new_stream(priority));
    return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) {
    return cudaStreamCreateWithPriority(handle, flags, 0);
}
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
    if (cudaError_t error = alive()) return error;
    return stream_of(handle)->idle() ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    stream_of(handle)->wait();
    return alive();
}
API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
    *priority = stream_of(handle)->priority;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *status,
                                         unsigned long long *, cudaGraph_t *,
                                         const cudaGraphNode_t **, const cudaGraphEdgeData **,
                                         size_t *) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned) {
    if (cudaError_t error = alive()) return error;
    *handle = reinterpret_cast<cudaEvent_t>(new Event);
    return cudaSuccess;
}
// Streams may still hold an event that torch destroys: they are few, and kept.
API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    if (cudaError_t error = alive()) return error;
    auto *event = reinterpret_cast<Event *>(handle);
    long turn;
    {
        std::lock_guard<std::mutex> held(event->lock);
        turn = ++event->recorded;
    }
    stream_of(stream)->put([event, turn] {
        {
            std::lock_guard<std::mutex> held(event->lock);
            event->done = std::max(event->done, turn);
            event->at = std::chrono::steady_clock::now();
        }
        event->changed.notify_all();
    });
    return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}
API cudaError_t cudaEventQuery(cudaEvent_t handle) {
    if (cudaError_t error = alive()) return error;
    auto *event = reinterpret_cast<Event *>(handle);
    std::lock_guard<std::mutex> held(event->lock);
    return event->done >= event->recorded ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    auto *event = reinterpret_cast<Event *>(handle);
    event->wait(event->recorded);
    return alive();
}
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t first, cudaEvent_t second) {
    auto taken = reinterpret_cast<Event *>(second)->at - reinterpret_cast<Event *>(first)->at;
    *ms = std::chrono::duration<float, std::milli>(taken).count();
    return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
    if (cudaError_t error = alive()) return error;
    auto *event = reinterpret_cast<Event *>(handle);
    std::unique_lock<std::mutex> held(event->lock);
    long turn = event->recorded;
    held.unlock();
    stream_of(stream)->put([event, turn] { event->wait(turn); });
    return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    stream_of(stream)->put([=] { function(data); });
    return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, cudaMemcpyKind kind,
                                cudaStream_t handle) {
    if (cudaError_t error = alive()) return error;
    if (cudaError_t error = planned_failure()) return error;
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if ((to_device && !on_device(target, size)) || (from_device && !on_device(source, size)))
        return fail(cudaErrorInvalidValue);
    Stream *stream = stream_of(handle);
    if (range_of(source, size)) {
        stream->put([=] { memcpy(target, source, size); });
    } else {
        // Pageable memory is read before the call returns, and written before it returns.
        auto *bytes = static_cast<const char *>(source);
        stream->put([target, held = std::vector<char>(bytes, bytes + size)] {
            memcpy(target, held.data(), held.size());
        });
    }
    if (!range_of(target, size)) stream->wait();
    return alive();
}
API cudaError_t cudaMemcpy(void *target, const void *source, size_t size, cudaMemcpyKind kind) {
    cudaError_t error = cudaMemcpyAsync(target, source, size, kind, nullptr);
    stream_of(nullptr)->wait();
    return error;
}
API cudaError_t cudaMemsetAsync(void *target, int value, size_t size, cudaStream_t stream) {
    if (cudaError_t error = alive()) return error;
    if (!on_device(target, size)) return fail(cudaErrorInvalidValue);
    stream_of(stream)->put([=] { memset(target, value, size); });
    return cudaSuccess;
}

// torch's own kernels are not run: operators.py stands in for those that are needed.
API cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t) {
    return fail(cudaErrorNotSupported);
}
API void **__cudaRegisterFatBinary(void *) {
    static void *handle;
    return &handle;
}
API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API void __cudaRegisterFunction(void **, const char *, char *, const char *, int, uint3 *, uint3 *,
                                dim3 *, dim3 *, int *) {}
API void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

// The page kernels, built as C++: `run(blocks, group, planes, geometry)`.
API cudaError_t emulated_launch(void (*run)(unsigned, const void *, const void *, const void *),
                                int word, unsigned blocks, const void *group, const void *planes,
                                const void *geometry, cudaStream_t stream) {
    if (cudaError_t error = alive()) return error;
    if (cudaError_t error = planned_failure()) return error;
    auto its_group = *static_cast<const PageGroup *>(group);
    auto its_geometry = *static_cast<const Geometry *>(geometry);
    stream_of(stream)->put([=] {
        if (may_touch(its_group, its_geometry, planes, word))
            run(blocks, &its_group, planes, &its_geometry);
        else
            lost = cudaErrorIllegalAddress;
    });
    return cudaSuccess;
}
API void emulated_fail_after(long calls) { until_failure = calls; }
API int emulated_pinned(const void *address) { return range_of(address, 1) != nullptr; }
API void emulated_sleep(cudaStream_t stream, long us) {
    stream_of(stream)->put([=] { usleep(us); });
}

API cudaError_t cudaGetDeviceCount(int *count) {
    long error = setting("EMULATED_COUNT_ERROR", 0);
    *count = error ? 0 : 1;
    return fail(static_cast<cudaError_t>(error));
}
API cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
    return device == 0 ? alive() : fail(cudaErrorInvalidDevice);
}
API cudaError_t cudaDriverGetVersion(int *version) {
    *version = setting("EMULATED_DRIVER", 13000);
    return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
    *can = 0;
    return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, "emulated");
    found->totalGlobalMem = device_bytes();
    found->major = 9;
    found->multiProcessorCount = 132;
    found->warpSize = 32;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsPerMultiProcessor = 2048;
    found->sharedMemPerBlock = 48 << 10;
    found->unifiedAddressing = found->canMapHostMemory = 1;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9
             : attribute == cudaDevAttrMultiProcessorCount  ? 132
             : attribute == cudaDevAttrUnifiedAddressing    ? 1
                                                            : 0;
    return cudaSuccess;
}
API const char *cudaGetErrorString(cudaError_t error) {
    switch (static_cast<int>(error)) {
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInsufficientDriver: return "driver version is insufficient for runtime version";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
        case cudaErrorNotSupported: return "operation not supported";
    }
    return "another error";
}
API const char *cudaGetErrorName(cudaError_t) { return "cudaErrorEmulated"; }
API cudaError_t cudaPeekAtLastError() {
    return lost.load() ? static_cast<cudaError_t>(lost.load()) : last_error;
}
API cudaError_t cudaGetLastError() {
    cudaError_t error = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return error;
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **function, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult *result) {
    *function = nullptr;
    if (result) *result = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
