/* Calls of the functional API that are known, found and launched without the interpreter in between; known_gradients.c and
 * known_module.c go on with this text, and the three are compiled as one.
 *
 * `Calls` has methods that do of most calls what those of `InPython` do that they are named after, by the same plans.
 * Whatever is another call is handed on to those, untouched. Of tensors nothing is known here but the Python methods, so
 * that this is compiled without torch, in the time that the launcher takes. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>

/* Of what autograd may be shown, residual included. */
#define MOST_OPERANDS 8

/* The options of a call: a norm, two numbers, and words. */
enum { NORM, EPS, WEIGHT_OFFSET, FIRST_WORD };

/* The operands that more is asked of than whether they are there. */
enum { X, WEIGHT, BIAS, RESIDUAL };

/* What it is made of: the object whose methods calls are handed on to; `PLACES`, where operands stand among all that a kernel
 * could read; what autograd records calls by; and what is asked and compared with. */
enum {
  OTHERWISE,
  PLACES,
  APPLY,
  APPLY_ADD,
  PLAIN,
  DISPATCH,
  FORWARD_AD,
  IS_GRAD_ENABLED,
  DISPATCH_MODES,
  DEFAULT_EPS,
  UNREADABLE,
  PACKED_DTYPE,
  GRADIENT_PLACES,
  RSTD_ADDRESS,
  HELD
};

typedef struct {
  PyObject_HEAD
  PyObject *held[HELD];
  double largest;
  Py_ssize_t width, misaligned, gradient_width, mean_place;
} Calls;

static PyObject *shape_name, *data_ptr_name, *contiguous_name, *plans_name, *fits_name, *plan_name, *trains_name,
    *level_name, *forward_name, *empty_name, *dtypes_name, *recorded_word, *rms_word, *zero, *one;
static PyObject *gradients_name, *layout_name, *sum_dtypes_name, *steps_name, *finish_name, *programs_name, *offsets_name,
    *length_name, *exchange_name, *by_address_name, *gradients_word, *layer_word;
static PyObject *normalise_name, *alone_name, *added_name, *recorded_alone_name, *recorded_added_name;

/* Whether an answer, which is taken, is yes: 1 or 0, and -1 with an exception. */
static int is_yes(PyObject *said) {
  if (said == NULL)
    return -1;
  int yes = PyObject_IsTrue(said);
  Py_DECREF(said);
  return yes;
}

/* Whether a tensor, if it is there, has no gaps. */
static int is_contiguous(PyObject *tensor) {
  return tensor == Py_None ? 1 : is_yes(PyObject_CallMethodNoArgs(tensor, contiguous_name));
}

/* A float that a kernel takes, within limits: 1 or 0. */
static int is_number(PyObject *value, double least, double largest) {
  if (!PyFloat_CheckExact(value))
    return 0;
  double number = PyFloat_AS_DOUBLE(value);
  return least <= number && number <= largest;
}

/* Whether what is to be normalised together is x's last dimension, as it is of a sum where nothing is said. The class of
 * each, because 64.0 is equal to 64. */
static int is_last(PyObject *normalized, PyObject *shape, PyObject *n, PyObject *residual) {
  if (normalized == Py_None)
    return residual != Py_None;
  PyObject *size;
  if ((PyTuple_CheckExact(normalized) || Py_TYPE(normalized) == Py_TYPE(shape)) && PyTuple_GET_SIZE(normalized) == 1)
    size = PyTuple_GET_ITEM(normalized, 0);
  else if (PyList_CheckExact(normalized) && PyList_GET_SIZE(normalized) == 1)
    size = PyList_GET_ITEM(normalized, 0);
  else
    return 0;
  return PyLong_CheckExact(size) && PyObject_RichCompareBool(size, n, Py_EQ);
}

/* x's rows, or -1 if they are none or an exception says why. */
static Py_ssize_t count_rows(PyObject *shape) {
  Py_ssize_t rows = 1;
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(shape) - 1; ++at) {
    PyObject *item = PyTuple_GET_ITEM(shape, at);
    if (!PyLong_CheckExact(item))
      return -1;
    Py_ssize_t size = PyLong_AsSsize_t(item);
    if (size <= 0)
      return -1;
    rows *= size;
  }
  return rows;
}

/* What `dispatch.plans` has under a key, which is taken: a new reference, since another thread may change it meanwhile; NULL
 * if there is nothing, if calls of some callers see other plans, or if an exception says why. */
static PyObject *kinds_of(Calls *self, PyObject *key) {
  PyObject *plans = key == NULL ? NULL : PyObject_GetAttr(self->held[DISPATCH], plans_name);
  PyObject *kinds = plans == NULL || !PyDict_CheckExact(plans) ? NULL : PyDict_GetItemWithError(plans, key);
  Py_XINCREF(kinds);
  Py_XDECREF(plans);
  Py_XDECREF(key);
  if (kinds != NULL && !PyTuple_Check(kinds))
    Py_CLEAR(kinds);
  return kinds;
}

/* The kinds of such a call. */
static PyObject *look_up(Calls *self, PyObject *const *operands, Py_ssize_t count, PyObject *options, PyObject *n,
                         PyObject *records) {
  Py_ssize_t at = 0, words = PyTuple_GET_SIZE(options) - FIRST_WORD;
  PyObject *key = PyTuple_New(4 + count - 1 + words);
  if (key == NULL)
    return NULL;
  PyObject *head[] = {recorded_word, PyTuple_GET_ITEM(options, NORM), n, records};
  for (Py_ssize_t place = 0; place < 4; ++place)
    PyTuple_SET_ITEM(key, at++, Py_NewRef(head[place]));
  for (Py_ssize_t place = WEIGHT; place < count; ++place)
    PyTuple_SET_ITEM(key, at++, Py_NewRef(operands[place] == Py_None ? Py_True : Py_False));
  for (Py_ssize_t place = FIRST_WORD; place < FIRST_WORD + words; ++place)
    PyTuple_SET_ITEM(key, at++, Py_NewRef(PyTuple_GET_ITEM(options, place)));
  return kinds_of(self, key);
}

/* The first kind whose guard the tensors fit, a new reference; NULL if none does, or an exception says why. */
static PyObject *fitting(PyObject *kinds, PyObject *const *operands, Py_ssize_t count) {
  PyObject *there[MOST_OPERANDS];
  size_t present = 0;
  for (Py_ssize_t at = 0; at < count; ++at)
    if (operands[at] != Py_None)
      there[present++] = operands[at];
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(kinds); ++at) {
    PyObject *kind = PyTuple_GET_ITEM(kinds, at);
    PyObject *fits = PyObject_GetAttr(kind, fits_name);
    if (fits == NULL)
      return NULL;
    int yes = is_yes(PyObject_Vectorcall(fits, there, present, NULL));
    Py_DECREF(fits);
    if (yes)
      return yes < 0 ? NULL : Py_NewRef(kind);
  }
  return NULL;
}

/* A tensor's address; NULL if it is not where a plan has it, or an exception says why. */
static PyObject *aligned_address(Calls *self, PyObject *tensor) {
  PyObject *address = PyObject_CallMethodNoArgs(tensor, data_ptr_name);
  if (address == NULL)
    return NULL;
  unsigned long long bits = PyLong_AsUnsignedLongLong(address);
  if (bits == 0 || (bits & (unsigned long long)self->misaligned) || PyErr_Occurred())
    Py_CLEAR(address);
  return address;
}

/* Of all that a kernel could read, and of these tensors their addresses; 0 if one is not where a plan has it. */
static int read_addresses(Calls *self, PyObject *const *operands, Py_ssize_t count, PyObject *tensors,
                          PyObject *addresses) {
  for (Py_ssize_t at = 0; at < self->width; ++at) {
    PyTuple_SET_ITEM(tensors, at, Py_NewRef(Py_None));
    PyTuple_SET_ITEM(addresses, at, Py_NewRef(zero));
  }
  for (Py_ssize_t at = 0; at < count; ++at) {
    if (operands[at] == Py_None)
      continue;
    PyObject *address = aligned_address(self, operands[at]);
    if (address == NULL)
      return 0;
    Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(self->held[PLACES], at));
    Py_DECREF(PyTuple_GET_ITEM(addresses, place));
    PyTuple_SET_ITEM(addresses, place, address);
    Py_DECREF(PyTuple_GET_ITEM(tensors, place));
    PyTuple_SET_ITEM(tensors, place, Py_NewRef(operands[at]));
  }
  return 1;
}

/* Whether nothing watches what runs: no level of forward-mode AD and no mode; 1 or 0, and -1 with an exception. */
static int is_unwatched(Calls *self) {
  PyObject *level = PyObject_GetAttr(self->held[FORWARD_AD], level_name);
  if (level == NULL)
    return -1;
  long within = PyLong_AsLong(level);
  Py_DECREF(level);
  if (within >= 0 || PyErr_Occurred())
    return PyErr_Occurred() ? -1 : 0;
  int seen = is_yes(PyObject_CallNoArgs(self->held[DISPATCH_MODES]));
  return seen < 0 ? -1 : !seen;
}

/* Whether a tensor, if it is there, is of a shape: likewise. */
static int has_shape(PyObject *tensor, PyObject *shape) {
  if (tensor == Py_None)
    return 1;
  PyObject *other = PyObject_GetAttr(tensor, shape_name);
  if (other == NULL)
    return -1;
  int same = PyObject_RichCompareBool(other, shape, Py_EQ);
  Py_DECREF(other);
  return same;
}

/* Whether each call, whatever its kind, may go this way: 1 or 0, and -1 with an exception. */
static int may_launch(Calls *self, PyObject *const *operands, PyObject *options, PyObject *shape, PyObject *eps) {
  PyObject *offset = PyTuple_GET_ITEM(options, WEIGHT_OFFSET), *residual = operands[RESIDUAL];
  if (!is_number(eps, 0.0, self->largest) || !is_number(offset, -self->largest, self->largest))
    return 0;
  if (PyFloat_AS_DOUBLE(offset) != 0.0) {
    int rms = PyObject_RichCompareBool(PyTuple_GET_ITEM(options, NORM), rms_word, Py_EQ);
    if (rms <= 0 || operands[WEIGHT] == Py_None)
      return rms < 0 ? -1 : 0;
  }
  int alone = is_unwatched(self);
  if (alone <= 0)
    return alone;
  return has_shape(residual, shape);
}

/* Whether a call that is known is to be recorded, and what its launch is told, as `find_recorded` returns them, of whose x
 * this is the shape; NULL if it is another call, or an exception says why. */
static PyObject *found_of(Calls *self, PyObject *const *operands, Py_ssize_t count, PyObject *options, PyObject *shape,
                          PyObject *normalized) {
  Py_ssize_t dimensions = PyTuple_GET_SIZE(shape);
  PyObject *n = PyTuple_GET_ITEM(shape, dimensions - 1), *eps = PyTuple_GET_ITEM(options, EPS);
  Py_ssize_t rows = count_rows(shape);
  if (rows < 0 || !PyLong_CheckExact(n) || is_last(normalized, shape, n, operands[RESIDUAL]) <= 0)
    return NULL;
  if (dimensions != 2 && (is_contiguous(operands[X]) <= 0 || is_contiguous(operands[RESIDUAL]) <= 0))
    return NULL;
  int enabled = is_yes(PyObject_CallNoArgs(self->held[IS_GRAD_ENABLED]));
  PyObject *kinds = enabled < 0 ? NULL : look_up(self, operands, count, options, n, enabled ? Py_True : Py_False);
  PyObject *kind = kinds == NULL ? NULL : fitting(kinds, operands, count);
  Py_XDECREF(kinds);
  if (kind == NULL)
    return NULL;
  if (eps == Py_None && PyObject_RichCompareBool(PyTuple_GET_ITEM(options, NORM), rms_word, Py_EQ) > 0)
    eps = self->held[DEFAULT_EPS];
  PyObject *plan = NULL, *trains = NULL, *m = NULL, *found = NULL;
  PyObject *tensors = PyTuple_New(self->width), *addresses = PyTuple_New(self->width);
  if (tensors != NULL && addresses != NULL && may_launch(self, operands, options, shape, eps) > 0 &&
      read_addresses(self, operands, count, tensors, addresses) && (plan = PyObject_GetAttr(kind, plan_name)) != NULL &&
      plan != Py_None && (trains = PyObject_GetAttr(kind, trains_name)) != NULL &&
      (m = PyLong_FromSsize_t(rows)) != NULL) {
    PyObject *told = PyTuple_Pack(7, plan, addresses, tensors, shape, m, eps, PyTuple_GET_ITEM(options, WEIGHT_OFFSET));
    if (told != NULL) {
      found = PyTuple_Pack(2, enabled ? trains : Py_False, told);
      Py_DECREF(told);
    }
  }
  Py_DECREF(kind);
  Py_XDECREF(plan);
  Py_XDECREF(trains);
  Py_XDECREF(m);
  Py_XDECREF(tensors);
  Py_XDECREF(addresses);
  return found;
}

/* The same of arguments as they came; NULL if it is another call, or an exception says why. */
static PyObject *found_among(Calls *self, PyObject *const *args) {
  PyObject *found = NULL, *shape = NULL;
  Py_ssize_t count = PyTuple_GET_SIZE(args[0]);
  PyObject *const *operands = &PyTuple_GET_ITEM(args[0], 0);
  /* A proxy of torch.fx records whatever it is asked. */
  if (count == PyTuple_GET_SIZE(self->held[PLACES]) && PyTuple_GET_SIZE(args[1]) >= FIRST_WORD &&
      PySet_Contains(self->held[PLAIN], (PyObject *)Py_TYPE(operands[X])) > 0) {
    shape = PyObject_GetAttr(operands[X], shape_name);
    if (shape != NULL && PyTuple_Check(shape) && PyTuple_GET_SIZE(shape) > 0)
      found = found_of(self, operands, count, args[1], shape, args[2]);
  }
  Py_XDECREF(shape);
  if (found == NULL && PyErr_Occurred() && PyErr_ExceptionMatches(self->held[UNREADABLE]))
    PyErr_Clear();
  return found;
}

/* What `forward` of a plan says of a number of rows, and what launches are told of a call; both are tuples. */
enum { LAUNCH, GRID, LENGTH, TO_RSTD, FORWARD };
enum { PLAN, ADDRESSES, TENSORS, SHAPE, ROWS, EPSILON, OFFSET, TOLD };

/* Behind the addresses of what is read: those of y, a sum, a scale, mean, rstd and an exchange; rows and two numbers. */
#define WRITTEN 9

/* A new tensor of a plan. */
static PyObject *allocate(PyObject *plan, PyObject *size, PyObject *strides, PyObject *dtype) {
  PyObject *empty = PyObject_GetAttr(plan, empty_name);
  if (empty == NULL)
    return NULL;
  PyObject *asked[] = {size, strides, dtype};
  PyObject *tensor = PyObject_Vectorcall(empty, asked, 3, NULL);
  Py_DECREF(empty);
  return tensor;
}

/* The size and the strides of tensors of x's shape without gaps, none of whose sizes is 0; -1 with an exception. */
static int lay_out(PyObject *shape, PyObject **size, PyObject **strides) {
  Py_ssize_t count = PyTuple_GET_SIZE(shape), step = 1;
  *size = PyTuple_GetSlice(shape, 0, count);
  *strides = PyTuple_New(count);
  if (*size == NULL || *strides == NULL)
    return -1;
  for (Py_ssize_t at = count - 1; at >= 0; --at) {
    PyObject *stride = PyLong_FromSsize_t(step);
    if (stride == NULL)
      return -1;
    PyTuple_SET_ITEM(*strides, at, stride);
    step *= PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, at));
  }
  return PyErr_Occurred() ? -1 : 0;
}

/* Of the results whose dtypes a plan has: y and, if there is one, the sum. */
enum { Y, SUM };

static PyObject *allocate_result(PyObject *plan, int which, PyObject *size, PyObject *strides) {
  PyObject *dtypes = PyObject_GetAttr(plan, dtypes_name), *result = NULL;
  if (dtypes != NULL && PyTuple_Check(dtypes) && PyTuple_GET_SIZE(dtypes) > SUM)
    result = allocate(plan, size, strides, PyTuple_GET_ITEM(dtypes, which));
  else if (dtypes != NULL)
    PyErr_SetString(PyExc_TypeError, "the dtypes of a plan are a tuple, of y and a sum among others");
  Py_XDECREF(dtypes);
  return result;
}

/* Rows' statistics, as `packing` lays them out. */
static PyObject *allocate_packed(Calls *self, PyObject *plan, PyObject *length) {
  PyObject *size = PyTuple_Pack(1, length), *strides = PyTuple_Pack(1, one), *packed = NULL;
  if (size != NULL && strides != NULL)
    packed = allocate(plan, size, strides, self->held[PACKED_DTYPE]);
  Py_XDECREF(size);
  Py_XDECREF(strides);
  return packed;
}

/* Zero stands for what is not there. */
static PyObject *address_of(PyObject *tensor) {
  return tensor == NULL ? Py_NewRef(zero) : PyObject_CallMethodNoArgs(tensor, data_ptr_name);
}

/* Launch with what is read, y and, if they are there, the sum and the statistics: 0, and -1 with an exception. */
static int launch(PyObject *forward, PyObject *told, PyObject *y, PyObject *sum, PyObject *packed) {
  PyObject *addresses = PyTuple_GET_ITEM(told, ADDRESSES), *to_rstd = PyTuple_GET_ITEM(forward, TO_RSTD);
  Py_ssize_t read = PyTuple_GET_SIZE(addresses);
  PyObject *y_at = address_of(y), *sum_at = address_of(sum), *packed_at = address_of(packed), *rstd_at = NULL;
  PyObject *values = PyTuple_New(read + WRITTEN), *nothing = NULL;
  if (y_at == NULL || sum_at == NULL || packed_at == NULL || values == NULL)
    goto end;
  rstd_at = packed == NULL ? Py_NewRef(zero) : PyNumber_Add(packed_at, to_rstd);
  if (rstd_at == NULL)
    goto end;
  /* Without means rstd is where they would be. */
  PyObject *mean_at = PyObject_RichCompareBool(to_rstd, zero, Py_NE) > 0 ? packed_at : zero;
  for (Py_ssize_t at = 0; at < read; ++at)
    PyTuple_SET_ITEM(values, at, Py_NewRef(PyTuple_GET_ITEM(addresses, at)));
  PyObject *behind[WRITTEN] = {y_at, sum_at, zero, mean_at, rstd_at, zero};
  for (Py_ssize_t at = ROWS; at <= OFFSET; ++at)
    behind[WRITTEN - 1 - OFFSET + at] = PyTuple_GET_ITEM(told, at);
  for (Py_ssize_t at = 0; at < WRITTEN; ++at)
    PyTuple_SET_ITEM(values, read + at, Py_NewRef(behind[at]));
  PyObject *given[] = {PyTuple_GET_ITEM(forward, GRID), values};
  nothing = PyObject_Vectorcall(PyTuple_GET_ITEM(forward, LAUNCH), given, 2, NULL);
end:
  Py_XDECREF(y_at);
  Py_XDECREF(sum_at);
  Py_XDECREF(packed_at);
  Py_XDECREF(rstd_at);
  Py_XDECREF(values);
  Py_XDECREF(nothing);
  return nothing == NULL ? -1 : 0;
}

/* Launch a call as it was found, with a sum and statistics or without; the method of this name does where it cannot. */
static PyObject *run(Calls *self, PyObject *told, int sums, int packs, PyObject *name) {
  if (!PyTuple_Check(told) || PyTuple_GET_SIZE(told) != TOLD) {
    PyErr_SetString(PyExc_TypeError, "a call is launched by what it was found to be");
    return NULL;
  }
  PyObject *plan = PyTuple_GET_ITEM(told, PLAN);
  PyObject *forward = PyObject_CallMethodOneArg(plan, forward_name, PyTuple_GET_ITEM(told, ROWS));
  if (forward == NULL)
    return NULL;
  if (!PyTuple_Check(forward) || PyTuple_GET_SIZE(forward) != FORWARD || PyTuple_GET_ITEM(forward, LAUNCH) == Py_None) {
    Py_DECREF(forward);
    return PyObject_CallMethodOneArg(self->held[OTHERWISE], name, told);
  }
  PyObject *y = NULL, *sum = NULL, *packed = NULL, *size = NULL, *strides = NULL, *made = NULL;
  if (lay_out(PyTuple_GET_ITEM(told, SHAPE), &size, &strides) == 0 &&
      (y = allocate_result(plan, Y, size, strides)) != NULL &&
      (!sums || (sum = allocate_result(plan, SUM, size, strides)) != NULL) &&
      (!packs || (packed = allocate_packed(self, plan, PyTuple_GET_ITEM(forward, LENGTH))) != NULL) &&
      launch(forward, told, y, sum, packed) == 0) {
    if (sums && packs)
      made = PyTuple_Pack(3, y, sum, packed);
    else
      made = sums || packs ? PyTuple_Pack(2, y, sums ? sum : packed) : Py_NewRef(y);
  }
  Py_DECREF(forward);
  Py_XDECREF(size);
  Py_XDECREF(strides);
  Py_XDECREF(y);
  Py_XDECREF(sum);
  Py_XDECREF(packed);
  return made;
}

static PyObject *run_recorded_alone(PyObject *self, PyObject *told) {
  return run((Calls *)self, told, 0, 1, recorded_alone_name);
}
static PyObject *run_recorded_added(PyObject *self, PyObject *told) {
  return run((Calls *)self, told, 1, 1, recorded_added_name);
}

/* Have autograd record a call that was found: the operands that are there up to the last one that may be, since it takes
 * some 0.1 us for each None. */
static PyObject *record(Calls *self, PyObject *operands, PyObject *options, PyObject *told) {
  PyObject *call = PyTuple_Pack(3, options, told, Py_None), *made = NULL;
  if (call == NULL)
    return NULL;
  PyObject *passed[1 + MOST_OPERANDS] = {call};
  Py_ssize_t count = PyTuple_GET_SIZE(operands), size = 1;
  int adds = PyTuple_GET_ITEM(operands, RESIDUAL) != Py_None;
  for (Py_ssize_t at = 0; at < count; ++at)
    if (adds || at != RESIDUAL)
      passed[size++] = PyTuple_GET_ITEM(operands, at);
  while (!adds && size > 1 + BIAS && passed[size - 1] == Py_None)
    --size;
  made = PyObject_Vectorcall(self->held[adds ? APPLY_ADD : APPLY], passed, (size_t)size, NULL);
  Py_DECREF(call);
  return made;
}

static PyObject *normalise(PyObject *object, PyObject *const *args, Py_ssize_t given) {
  Calls *self = (Calls *)object;
  if (given != 3 || !PyTuple_Check(args[0]) || !PyTuple_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "a call is looked up by its operands, its options and a shape");
    return NULL;
  }
  PyObject *found = found_among(self, args);
  if (found == NULL) {
    PyObject *passed[] = {self->held[OTHERWISE], args[0], args[1], args[2]};
    return PyErr_Occurred() ? NULL : PyObject_VectorcallMethod(normalise_name, passed, 4, NULL);
  }
  PyObject *records = PyTuple_GET_ITEM(found, 0), *told = PyTuple_GET_ITEM(found, 1), *made;
  int adds = PyTuple_GET_ITEM(args[0], RESIDUAL) != Py_None;
  if (records != Py_False)
    made = record(self, args[0], args[1], told);
  else
    made = run(self, told, adds, 0, adds ? added_name : alone_name);
  Py_DECREF(found);
  return made;
}
