/* A launcher of a compiled kernel that prepares whatever is equal in all launches.
 *
 * The driver receives exactly the arguments that the launchers of Triton 3.6 and 3.7 pass, for kernels without tensor
 * descriptors, scratch memory and clusters, which `triton_launcher.py` selects. Types come from the cuda.h that Triton
 * ships, addresses of functions from the caller. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cuda.h"

/* The most parameters of a kernel; they are on the stack during a launch. */
#define MOST_PARAMETERS 128

/* Pointers behind a kernel's own parameters: scratch memory and the profiler's, both null here. */
#define SCRATCHES 2

typedef union {
  int32_t i32;
  int64_t i64; /* pointers too */
  float f32;
} Cell;

/* A kernel's parameter: its kind, 'p', 'i', 'l' or 'f', and its index in the values of a launch, or -1 if fixed. */
typedef struct {
  int kind;
  Py_ssize_t place;
  Cell fixed;
} Parameter;

/* The functions of the driver, in the order in which `triton_launcher` passes them. */
typedef struct {
  CUresult (*launch)(const CUlaunchConfig *, CUfunction, void **, void **);
  CUresult (*describe)(CUresult, const char **);
  CUresult (*context)(CUcontext *);
  CUresult (*device)(CUdevice *, int);
  CUresult (*retain)(CUcontext *, CUdevice);
  CUresult (*enter)(CUcontext);
} Driver;

/* The Python objects that a launch holds. */
#define EACH_OBJECT(use) use(device) use(current_stream) use(hooks) use(enter) use(leave) use(observed)
#define AS_OBJECT(name) PyObject *name;
typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Driver driver;
  CUfunction function;
  /* All but the grid and the stream of a launch. */
  CUlaunchConfig config;
  CUlaunchAttribute attributes[2];
  int ordinal;
  EACH_OBJECT(AS_OBJECT)
  Py_ssize_t n_values, count;
  Parameter parameters[MOST_PARAMETERS];
} Launch;

static PyObject *enter_name, *leave_name, *calls_name;

/* Convert a Python value to a kernel's parameter. Return 0, or -1 with an exception. */
static int convert(int kind, PyObject *value, Cell *cell) {
  if (kind == 'f') {
    double wide = PyFloat_AsDouble(value);
    cell->f32 = (float)wide;
    return wide == -1.0 && PyErr_Occurred() ? -1 : 0;
  }
  if (kind == 'p' && !PyLong_Check(value)) {
    PyErr_Format(PyExc_TypeError, "a pointer is given as an int, not as %.100s", Py_TYPE(value)->tp_name);
    return -1;
  }
  long long wide = kind == 'p' ? (long long)PyLong_AsUnsignedLongLong(value) : PyLong_AsLongLong(value);
  if (wide == -1 && PyErr_Occurred())
    return -1;
  if (kind == 'i' && (wide < INT32_MIN || wide > INT32_MAX)) {
    PyErr_Format(PyExc_OverflowError, "%lld does not fit an i32", wide);
    return -1;
  }
  if (kind == 'i')
    cell->i32 = (int32_t)wide;
  else
    cell->i64 = wide;
  return 0;
}

/* Return 1 if a chain of hooks is in its place and empty, 0 if not, and -1 with an exception. */
static int is_quiet(PyObject *hooks, PyObject *name, PyObject *chain) {
  PyObject *there = PyObject_GetAttr(hooks, name);
  Py_XDECREF(there);
  if (there != chain)
    return there == NULL ? -1 : 0;
  PyObject *calls = PyObject_GetAttr(chain, calls_name);
  int quiet = calls == NULL ? -1 : PyList_Check(calls) && PyList_GET_SIZE(calls) == 0;
  Py_XDECREF(calls);
  return quiet;
}

static int read_grid(PyObject *grid, CUlaunchConfig *config) {
  unsigned *sizes[] = {&config->gridDimX, &config->gridDimY, &config->gridDimZ};
  if (!PyTuple_Check(grid) || PyTuple_GET_SIZE(grid) != 3) {
    PyErr_SetString(PyExc_TypeError, "a grid is a tuple of three ints");
    return -1;
  }
  for (int axis = 0; axis < 3; ++axis) {
    long long size = PyLong_AsLongLong(PyTuple_GET_ITEM(grid, axis));
    if (size < 0 || size > INT_MAX) {
      if (!PyErr_Occurred())
        PyErr_Format(PyExc_OverflowError, "a grid of %lld programs", size);
      return -1;
    }
    *sizes[axis] = (unsigned)size;
  }
  return 0;
}

static int read_stream(Launch *self, CUstream *stream) {
  PyObject *number = PyObject_CallOneArg(self->current_stream, self->device);
  if (number == NULL)
    return -1;
  unsigned long long handle = PyLong_AsUnsignedLongLong(number);
  Py_DECREF(number);
  *stream = (CUstream)(uintptr_t)handle;
  return handle == (unsigned long long)-1 && PyErr_Occurred() ? -1 : 0;
}

/* Launch without Python's lock. A thread that has not used the GPU yet has no context, and takes its device's. */
static CUresult put_on_stream(Launch *self, const CUlaunchConfig *config, void **parameters) {
  const Driver *driver = &self->driver;
  CUcontext context = NULL;
  CUresult status = driver->context(&context);
  if (status == CUDA_SUCCESS && context == NULL) {
    CUdevice device;
    status = driver->device(&device, self->ordinal);
    if (status == CUDA_SUCCESS)
      status = driver->retain(&context, device);
    if (status == CUDA_SUCCESS)
      status = driver->enter(context);
  }
  return status == CUDA_SUCCESS ? driver->launch(config, self->function, parameters, NULL) : status;
}

static PyObject *raise_status(Launch *self, CUresult status) {
  const char *description = NULL;
  if (self->driver.describe(status, &description) != CUDA_SUCCESS || description == NULL)
    return PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %d", (int)status);
  return PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %s", description);
}

static PyObject *launch(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
  Launch *self = (Launch *)callable;
  if (PyVectorcall_NARGS(flags) != 2 || (names != NULL && PyTuple_GET_SIZE(names) != 0))
    return PyErr_Format(PyExc_TypeError, "a launch takes a grid and values");
  int quiet = is_quiet(self->hooks, enter_name, self->enter);
  if (quiet > 0)
    quiet = is_quiet(self->hooks, leave_name, self->leave);
  if (quiet <= 0)
    return quiet < 0 ? NULL : PyObject_Vectorcall(self->observed, args, 2, NULL);

  PyObject *values = args[1];
  if (!PyTuple_Check(values) || PyTuple_GET_SIZE(values) != self->n_values)
    return PyErr_Format(PyExc_TypeError, "the values of this launch are a tuple of %zd", self->n_values);
  CUlaunchConfig config = self->config;
  if (read_grid(args[0], &config) < 0 || read_stream(self, &config.hStream) < 0)
    return NULL;
  Cell cells[MOST_PARAMETERS];
  void *parameters[MOST_PARAMETERS + SCRATCHES];
  CUdeviceptr none = 0;
  Py_ssize_t count = self->count;
  for (Py_ssize_t at = 0; at < count; ++at) {
    Parameter *parameter = &self->parameters[at];
    if (parameter->place >= 0 && convert(parameter->kind, PyTuple_GET_ITEM(values, parameter->place), &cells[at]) < 0)
      return NULL;
    parameters[at] = parameter->place < 0 ? &parameter->fixed : &cells[at];
  }
  for (Py_ssize_t at = 0; at < SCRATCHES; ++at)
    parameters[count + at] = &none;
  if (config.gridDimX == 0 || config.gridDimY == 0 || config.gridDimZ == 0)
    Py_RETURN_NONE;

  CUresult status;
  /* Release the lock, as Triton does: a launch on a full queue may wait for a thread that waits for the lock. */
  Py_BEGIN_ALLOW_THREADS
  status = put_on_stream(self, &config, parameters);
  Py_END_ALLOW_THREADS
  return status == CUDA_SUCCESS ? Py_NewRef(Py_None) : raise_status(self, status);
}

static int read_parameters(Launch *self, PyObject *passed) {
  Py_ssize_t count = PyTuple_GET_SIZE(passed);
  if (count > MOST_PARAMETERS) {
    PyErr_Format(PyExc_ValueError, "%zd parameters, of at most %d", count, MOST_PARAMETERS);
    return -1;
  }
  self->count = count;
  for (Py_ssize_t at = 0; at < count; ++at) {
    Parameter *parameter = &self->parameters[at];
    PyObject *value;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(passed, at), "CnO", &parameter->kind, &parameter->place, &value))
      return -1;
    if (parameter->place >= self->n_values || parameter->place < -1) {
      PyErr_Format(PyExc_ValueError, "place %zd of %zd values", parameter->place, self->n_values);
      return -1;
    }
    if (parameter->place < 0 && convert(parameter->kind, value, &parameter->fixed) < 0)
      return -1;
  }
  return 0;
}

#define TAKE_OBJECT(name) self->name = Py_NewRef(name);
static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *names) {
  static char *known[] = {"driver",   "function",   "threads", "shared",         "pdl",   "cooperative",
                          "n_values", "parameters", "device",  "current_stream", "hooks", "observed",
                          NULL};
  const CUlaunchAttribute early = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                   .value = {.programmaticStreamSerializationAllowed = 1}};
  const CUlaunchAttribute together = {.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, .value = {.cooperative = 1}};
  unsigned long long function, at[sizeof(Driver) / sizeof(void *)];
  int threads, shared, pdl, cooperative;
  Py_ssize_t n_values;
  PyObject *parameters, *device, *current_stream, *hooks, *enter, *leave, *observed;
  if (!PyArg_ParseTupleAndKeywords(args, names, "(KKKKKK)KiippnO!OO(OOO)O", known, &at[0], &at[1], &at[2], &at[3], &at[4],
                                   &at[5], &function, &threads, &shared, &pdl, &cooperative, &n_values, &PyTuple_Type,
                                   &parameters, &device, &current_stream, &hooks, &enter, &leave, &observed))
    return NULL;
  long ordinal = PyLong_AsLong(device);
  if (ordinal == -1 && PyErr_Occurred())
    return NULL;
  if (threads <= 0 || shared < 0 || ordinal < 0 || ordinal > INT_MAX)
    return PyErr_Format(PyExc_ValueError, "%d threads with %d bytes of shared memory on device %ld", threads, shared,
                        ordinal);
  Launch *self = (Launch *)type->tp_alloc(type, 0);
  if (self == NULL)
    return NULL;
  memcpy(&self->driver, at, sizeof(at));
  self->vectorcall = launch;
  self->function = (CUfunction)(uintptr_t)function;
  self->config = (CUlaunchConfig){.blockDimX = (unsigned)threads, .blockDimY = 1, .blockDimZ = 1,
                                  .sharedMemBytes = (unsigned)shared, .attrs = self->attributes};
  self->ordinal = (int)ordinal;
  self->n_values = n_values;
  if (pdl)
    self->attributes[self->config.numAttrs++] = early;
  if (cooperative)
    self->attributes[self->config.numAttrs++] = together;
  EACH_OBJECT(TAKE_OBJECT)
  if (read_parameters(self, parameters) < 0)
    Py_CLEAR(self);
  return (PyObject *)self;
}

/* A launch is immutable, as tuples are, so that cycles are broken elsewhere: there is no tp_clear. */
#define VISIT(name) Py_VISIT(self->name);
static int traverse(PyObject *object, visitproc visit, void *arg) {
  Launch *self = (Launch *)object;
  EACH_OBJECT(VISIT)
  return 0;
}

#define RELEASE(name) Py_XDECREF(self->name);
static void dealloc(PyObject *object) {
  Launch *self = (Launch *)object;
  PyObject_GC_UnTrack(object);
  EACH_OBJECT(RELEASE)
  Py_TYPE(object)->tp_free(object);
}

static PyTypeObject LaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "normforge_launcher.Launch",
    .tp_doc = "Launches a kernel on the current stream, given a grid of three ints and a tuple of values.",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = make,
    .tp_dealloc = dealloc,
    .tp_traverse = traverse,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Launch, vectorcall),
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "normforge_launcher", .m_size = -1};

PyMODINIT_FUNC PyInit_normforge_launcher(void) {
  enter_name = PyUnicode_InternFromString("launch_enter_hook");
  leave_name = PyUnicode_InternFromString("launch_exit_hook");
  calls_name = PyUnicode_InternFromString("calls");
  if (enter_name == NULL || leave_name == NULL || calls_name == NULL)
    return NULL;
  PyObject *module = PyModule_Create(&definition);
  if (module != NULL && PyModule_AddType(module, &LaunchType) < 0)
    Py_CLEAR(module);
  return module;
}
