// A CUDA device that computes nothing: runtime, driver and cuBLAS as far as PyTorch calls them.
//
// Memory of the device is memory of the host that is reserved and never written: it is all zeros,
// and that is what copies to the host bring. Kernels, matrix products and copies are counted and not
// run. All that happens on the host is real: PyTorch's caching allocator, streams, events,
// generators, Inductor's code, Triton's compiler. build.sh makes libcuda.so.1 of this, and of
// functions that return 0 for what is not here.
//
// STAND_IN_DEVICES: how many there are (1). STAND_IN_GIB: memory of one (139).
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#undef cudaGetDeviceProperties

// -- what was asked for -------------------------------------------------------------------------

enum { LAUNCHES, TRITON, PRODUCTS, TO_DEVICE, TO_HOST, WITHIN, SYNCS, MALLOCS, MEMSETS, EVENTS, GRAPHS, ALL };
long long stand_in_counts[ALL];
const char *stand_in_names(void) {
  return "launches triton products to_device to_host within syncs mallocs memsets events graphs";
}

// Between these two a stream records a graph: what waits, or asks for memory, is refused then, and
// what is asked of the device is counted whenever the graph is launched.
static int capturing = 0;
static unsigned long long capture_id = 0;
static long long captured[ALL];
#define REFUSED_IN_CAPTURE \
  if (capturing) return cudaErrorStreamCaptureUnsupported

static void count(int what) {
  int is_now = !capturing || what == MALLOCS || what == EVENTS;
  __atomic_add_fetch(is_now ? &stand_in_counts[what] : &captured[what], 1, __ATOMIC_RELAXED);
}

static int devices = 1;
static size_t total_bytes = (size_t)139 << 30;
static __thread int current = 0;

__attribute__((constructor)) static void begin(void) {
  const char *number = getenv("STAND_IN_DEVICES"), *gib = getenv("STAND_IN_GIB");
  if (number) devices = atoi(number);
  if (gib) total_bytes = (size_t)atoi(gib) << 30;
}

// -- memory -------------------------------------------------------------------------------------

enum { PAGE = 4096, MOST_DEVICES = 16 };
static size_t used_bytes[MOST_DEVICES];

static int reserve(int device, size_t bytes) {
  if (__atomic_add_fetch(&used_bytes[device], bytes, __ATOMIC_RELAXED) <= total_bytes) return 1;
  __atomic_sub_fetch(&used_bytes[device], bytes, __ATOMIC_RELAXED);
  return 0;
}

static void release(int device, size_t bytes) {
  __atomic_sub_fetch(&used_bytes[device], bytes, __ATOMIC_RELAXED);
}

static void *mapped(size_t bytes, int protection) {
  void *found = mmap(0, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return found == MAP_FAILED ? 0 : found;
}

// A page before each block says how large it is, and whose.
typedef struct { size_t bytes; int device; } Block;

static void *take(size_t bytes, int device) {
  Block *block = mapped(bytes + PAGE, PROT_READ | PROT_WRITE);
  if (!block) return 0;
  block->bytes = bytes, block->device = device;
  return (char *)block + PAGE;
}

static void give(void *p) {
  if (!p) return;
  Block *block = (Block *)((char *)p - PAGE);
  if (block->device >= 0) release(block->device, block->bytes);
  munmap(block, block->bytes + PAGE);
}

cudaError_t cudaMalloc(void **p, size_t bytes) {
  REFUSED_IN_CAPTURE;  // PyTorch relaxes the mode of capture around this; see below
  count(MALLOCS);
  *p = reserve(current, bytes) ? take(bytes, current) : 0;
  return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *p) { give(p); return cudaSuccess; }
cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t s) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags) {
  *p = take(bytes, -1);
  return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFreeHost(void *p) { give(p); return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *all_bytes) {
  *all_bytes = total_bytes, *free_bytes = total_bytes - used_bytes[current];
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *p) {
  memset(found, 0, sizeof *found);
  found->type = cudaMemoryTypeDevice;
  found->devicePointer = found->hostPointer = (void *)p;
  return cudaSuccess;
}

// Virtual memory, for expandable_segments: a handle is a size, with the device in its low bits.
CUresult cuMemAddressReserve(CUdeviceptr *p, size_t bytes, size_t a, CUdeviceptr at,
                             unsigned long long flags) {
  *p = (CUdeviceptr)mapped(bytes, PROT_NONE);
  return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t bytes) {
  munmap((void *)p, bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *of, unsigned long long flags) {
  if (!reserve(of->location.id, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  count(MALLOCS);
  *handle = bytes | of->location.id;
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  release(handle % MOST_DEVICES, handle - handle % MOST_DEVICES);
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr p, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  mprotect((void *)p, bytes, PROT_READ | PROT_WRITE);
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr p, size_t bytes) {
  madvise((void *)p, bytes, MADV_DONTNEED);
  mprotect((void *)p, bytes, PROT_NONE);
  return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *of,
                                       CUmemAllocationGranularity_flags flags) {
  *bytes = 2 << 20;
  return CUDA_SUCCESS;
}

static cudaError_t copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  count(kind == cudaMemcpyHostToDevice ? TO_DEVICE : kind == cudaMemcpyDeviceToHost ? TO_HOST : WITHIN);
  if (kind == cudaMemcpyDeviceToHost) memset(to, 0, bytes);
  if (kind == cudaMemcpyHostToHost) memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s) {
  return copy(to, from, bytes, kind);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  REFUSED_IN_CAPTURE;
  count(SYNCS);
  return copy(to, from, bytes, kind);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t bytes,
                                cudaStream_t s) {
  return copy(to, from, bytes, cudaMemcpyDeviceToDevice);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t s) {
  for (size_t row = 0; row < height && kind == cudaMemcpyDeviceToHost; row++)
    memset((char *)to + row * to_pitch, 0, width);
  return copy(to, from, 0, kind);
}
cudaError_t cudaMemset(void *p, int value, size_t bytes) { count(MEMSETS); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s) {
  return cudaMemset(p, value, bytes);
}

// -- devices ------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int *number) { *number = devices; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { current = device; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int device) {
  snprintf(text, bytes, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

// Those of an H200.
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H200 (computes nothing)");
  p->totalGlobalMem = total_bytes;
  p->major = 9, p->minor = 0, p->multiProcessorCount = 132, p->warpSize = 32;
  p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = p->totalConstMem = 65536;
  p->l2CacheSize = 60 << 20, p->memoryBusWidth = 6144, p->textureAlignment = 512;
  p->concurrentKernels = p->asyncEngineCount = 1;
  p->unifiedAddressing = p->canMapHostMemory = p->cooperativeLaunch = 1;
  return cudaSuccess;
}

static int attribute(int which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrTotalConstantMemory: case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrWarpSize: case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMemoryClockRate: return 3201000;
    case cudaDevAttrGlobalMemoryBusWidth: return 6144;
    case cudaDevAttrL2CacheSize: return 60 << 20;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrCooperativeLaunch: return 1;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
  }
  return 0;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
  *value = attribute(which);
  return cudaSuccess;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  *value = attribute(which);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *number) { *number = devices; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)16; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 8 << 20; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)16;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
  *flags = 0, *is_active = 1;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr p) {
  *(CUdeviceptr *)value = p;
  return CUDA_SUCCESS;
}

static const char *text_of(int error) {
  return error == cudaErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing"
         : error == cudaErrorMemoryAllocation       ? "out of memory"
                                                    : "an error of the stand-in";
}
const char *cudaGetErrorString(cudaError_t error) { return text_of(error); }
const char *cudaGetErrorName(cudaError_t error) { return "cudaError"; }
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = text_of(error);
  return CUDA_SUCCESS;
}

// -- streams, events, graphs: all is done as soon as it is asked for -------------------------------

static cudaError_t new_stream(cudaStream_t *stream) {
  static long last = 0x1000;
  *stream = (cudaStream_t)__atomic_add_fetch(&last, 16, __ATOMIC_RELAXED);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { return new_stream(s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { return new_stream(s); }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *low, int *high) {
  *low = 0, *high = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  REFUSED_IN_CAPTURE;
  count(SYNCS);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) { return cudaStreamSynchronize(0); }

cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **needs, const cudaGraphEdgeData **edges,
                                     size_t *number) {
  cudaStreamIsCapturing(s, status);
  if (id) *id = capture_id;
  if (graph) *graph = (cudaGraph_t)16;
  if (needs) *needs = 0;
  if (number) *number = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  // As PyTorch does around cudaMalloc, which is allowed until it changes the mode back.
  static __thread int is_relaxed = 0, before = 0;
  if (*mode == cudaStreamCaptureModeRelaxed) {
    before = capturing, capturing = 0, is_relaxed = 1, *mode = cudaStreamCaptureModeGlobal;
  } else {
    if (is_relaxed) capturing = before;
    is_relaxed = 0, *mode = cudaStreamCaptureModeRelaxed;
  }
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
  memset(captured, 0, sizeof captured);
  capturing = 1, capture_id++;
  return cudaSuccess;
}
// A graph is how often it asks for what.
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
  capturing = 0, *graph = malloc(sizeof captured);
  memcpy(*graph, captured, sizeof captured);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph,
                                          unsigned long long flags) {
  *made = malloc(sizeof captured);
  memcpy(*made, graph, sizeof captured);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t s) {
  count(GRAPHS);
  for (int what = 0; what < ALL; what++)
    __atomic_add_fetch(&stand_in_counts[what], ((long long *)graph)[what], __ATOMIC_RELAXED);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { free(graph); return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { free(graph); return cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *number) {
  *number = 1;
  return cudaSuccess;
}

// An event is the time at which it was recorded.
static cudaError_t new_event(cudaEvent_t *event) {
  *event = calloc(1, sizeof(struct timespec));
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return new_event(event); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return new_event(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s) {
  count(EVENTS);
  clock_gettime(CLOCK_MONOTONIC, (struct timespec *)event);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t s, unsigned flags) {
  return cudaEventRecord(event, s);
}
cudaError_t cudaEventQuery(cudaEvent_t event) { REFUSED_IN_CAPTURE; return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaStreamSynchronize(0); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
  struct timespec *a = (void *)from, *b = (void *)to;
  *ms = (b->tv_sec - a->tv_sec) * 1e3 + (b->tv_nsec - a->tv_nsec) * 1e-6;
  return cudaSuccess;
}

// -- kernels ------------------------------------------------------------------------------------

static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed;
void **__cudaRegisterFatBinary(void *binary) { return calloc(1, 64); }
char __cudaInitModule(void **handle) { return 1; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *s) {
  pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = s;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
  *(void **)stream = pushed.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

static cudaError_t launched(void) { count(LAUNCHES); return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 grid, dim3 block, void **given, size_t shared,
                               cudaStream_t s) {
  return launched();
}
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **given, size_t shared,
                             cudaStream_t s) {
  return launched();
}
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **given,
                                        size_t shared, cudaStream_t s) {
  return launched();
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **given) {
  return launched();
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *f) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024, found->numRegs = 64;
  found->ptxVersion = found->binaryVersion = 90;
  found->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *f, int threads,
                                                          size_t shared) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f,
                                                                   int threads, size_t shared,
                                                                   unsigned flags) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) {
  *p = (void *)symbol;
  return cudaSuccess;
}

static CUresult module(CUmodule *made) { *made = (CUmodule)16; return CUDA_SUCCESS; }
CUresult cuModuleLoad(CUmodule *made, const char *path) { return module(made); }
CUresult cuModuleLoadData(CUmodule *made, const void *image) { return module(made); }
CUresult cuModuleLoadDataEx(CUmodule *made, const void *image, unsigned n, CUjit_option *options,
                            void **values) {
  return module(made);
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule of, const char *name) {
  *function = (CUfunction)16;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : which == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                            : 0;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction f, int threads,
                                                     size_t shared) {
  *blocks = 2;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction f, const CUlaunchConfig *config) {
  *clusters = 2;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction f, unsigned x, unsigned y, unsigned z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream s,
                        void **given, void **extra) {
  count(TRITON);
  return x && y && z ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **given, void **extra) {
  count(TRITON);
  return CUDA_SUCCESS;
}

static int nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = (void *)nothing;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// -- cuBLAS -------------------------------------------------------------------------------------

static int made(void **handle) { *handle = calloc(1, 256); return 0; }
int cublasCreate_v2(void **handle) { return made(handle); }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
#define PRODUCT(name) int name(void) { count(PRODUCTS); return 0; }
PRODUCT(cublasGemmEx) PRODUCT(cublasGemmStridedBatchedEx) PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemm_v2) PRODUCT(cublasSgemmStridedBatched) PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemm_v2) PRODUCT(cublasDgemmStridedBatched) PRODUCT(cublasDgemv_v2)
PRODUCT(cublasLtMatmul)
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtCreate(void **handle) { return made(handle); }
int cublasLtMatmulDescCreate(void **handle) { return made(handle); }
int cublasLtMatrixLayoutCreate(void **handle) { return made(handle); }
int cublasLtMatmulPreferenceCreate(void **handle) { return made(handle); }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *of, void *a, void *b, void *c, void *d,
                                   void *preference, int most, void *results, int *found) {
  memset(results, 0, 64);
  *found = 1;
  return 0;
}
