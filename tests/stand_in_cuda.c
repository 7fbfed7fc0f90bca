/* The driver that tests/stand_in_cuda.py describes. */
#include <stdint.h>
#include <string.h>

typedef struct { unsigned grid[3], block[3], shared; void *stream; struct Attribute *attrs; unsigned count; } Config;
struct Attribute { int id; char pad[4]; char value[64]; };

int launches, status, sizes[128], count;
unsigned grid[3], block[3], shared, attributes, ids[4], values[4];
uint64_t stream, function, parameters[128], context = 0xC0;
int retained = -1;

int cuLaunchKernelEx(const Config *config, void *kernel, void **given, void **extra) {
  memcpy(grid, config->grid, sizeof grid);
  memcpy(block, config->block, sizeof block);
  shared = config->shared;
  stream = (uint64_t)config->stream;
  function = (uint64_t)kernel;
  attributes = config->count;
  for (unsigned at = 0; at < attributes; ++at) {
    ids[at] = config->attrs[at].id;
    memcpy(&values[at], config->attrs[at].value, 4);
  }
  memset(parameters, 0, sizeof parameters);
  for (int at = 0; at < count; ++at)
    memcpy(&parameters[at], given[at], sizes[at]);
  ++launches;
  return status;
}
int cuGetErrorString(int code, const char **text) {
  *text = code == 701 ? "too many resources requested for launch" : 0;
  return *text ? 0 : 1;
}
int cuCtxGetCurrent(uint64_t *found) { *found = context; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return 0; }
int cuDevicePrimaryCtxRetain(uint64_t *found, int device) { retained = device; *found = 0xC0; return 0; }
int cuCtxSetCurrent(uint64_t entered) { context = entered; return 0; }

int cuDeviceGetAttribute(int *value, int which, int device) { *value = 232448; return 0; }
int cuModuleLoadData(uint64_t *module, const void *image) { *module = 1; return 0; }
int cuModuleGetFunction(uint64_t *found, uint64_t module, const char *name) { *found = 0xF0; return 0; }
int cuFuncGetAttribute(int *value, int which, uint64_t kernel) { *value = 1024; return 0; }
int cuFuncSetAttribute(void) { return 0; }
int cuFuncSetCacheConfig(void) { return 0; }
int cuPointerGetAttribute(void) { return 0; }
int cuCtxGetLimit(void) { return 0; }
int cuCtxSetLimit(void) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuOccupancyMaxActiveClusters(void) { return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
int cuTensorMapEncodeIm2col(void) { return 0; }
