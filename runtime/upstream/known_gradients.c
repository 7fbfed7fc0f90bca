/* The gradients of a call that is known, as known_calls.c has the call. */

/* The operands of a backward pass, and its options. */
enum { BWD_DY, BWD_X, BWD_WEIGHT, BWD_RSTD, BWD_X_BIAS, BWD_DRESIDUAL_OUT, BWD_OPERANDS };
enum { BWD_NORM, BWD_WEIGHT_OFFSET, BWD_CAST, BWD_DX_DTYPE, BWD_BIAS_DTYPE, BWD_WANTS, BWD_OPTIONS };

/* What is kept of one M's layout, as `Layout` names it. */
typedef struct {
  PyObject *steps, *finish, *programs, *offsets, *length;
} Laid;

static void drop(Laid *laid) {
  Py_CLEAR(laid->steps);
  Py_CLEAR(laid->finish);
  Py_CLEAR(laid->programs);
  Py_CLEAR(laid->offsets);
  Py_CLEAR(laid->length);
}

/* 1 with the layout of a number of rows; 0 if it is launched otherwise, and -1 with an exception. */
static int lay_out_rows(PyObject *plan, PyObject *m, Laid *laid) {
  PyObject *layout = PyObject_CallMethodOneArg(plan, layout_name, m);
  if (layout == NULL)
    return -1;
  int simple = is_yes(PyObject_GetAttr(layout, by_address_name));
  int exchanges = simple <= 0 ? 0 : is_yes(PyObject_GetAttr(layout, exchange_name));
  int served = simple < 0 || exchanges < 0 ? -1 : simple && !exchanges;
  if (served > 0 && ((laid->steps = PyObject_GetAttr(layout, steps_name)) == NULL ||
                     (laid->finish = PyObject_GetAttr(layout, finish_name)) == NULL ||
                     (laid->programs = PyObject_GetAttr(layout, programs_name)) == NULL ||
                     (laid->offsets = PyObject_GetAttr(layout, offsets_name)) == NULL ||
                     (laid->length = PyObject_GetAttr(layout, length_name)) == NULL))
    served = -1;
  if (served > 0 && !(PyTuple_Check(laid->steps) && PyTuple_Check(laid->offsets))) {
    PyErr_SetString(PyExc_TypeError, "the steps and the offsets of a layout are tuples");
    served = -1;
  }
  Py_DECREF(layout);
  return served;
}

/* The addresses of what is read, by the family's places; NULL if one is not where a plan has it. */
static PyObject *arriving_addresses(Calls *self, PyObject *const *operands, PyObject *norm, PyObject *m) {
  PyObject *addresses = PyTuple_New(self->gradient_width);
  if (addresses == NULL)
    return NULL;
  for (Py_ssize_t at = 0; at < self->gradient_width; ++at)
    PyTuple_SET_ITEM(addresses, at, Py_NewRef(zero));
  for (Py_ssize_t at = 0; at < BWD_OPERANDS; ++at) {
    if (operands[at] == Py_None)
      continue;
    PyObject *address = aligned_address(self, operands[at]);
    if (address == NULL) {
      Py_DECREF(addresses);
      return NULL;
    }
    Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(self->held[GRADIENT_PLACES], at));
    int centres = at != BWD_RSTD ? 0 : PyObject_RichCompareBool(norm, layer_word, Py_EQ);
    if (centres > 0) {
      /* The means come first, in the same tensor. */
      Py_DECREF(PyTuple_GET_ITEM(addresses, self->mean_place));
      PyTuple_SET_ITEM(addresses, self->mean_place, address);
      address = PyObject_CallFunctionObjArgs(self->held[RSTD_ADDRESS], address, m, NULL);
    }
    if (centres < 0 || address == NULL) {
      Py_XDECREF(centres < 0 ? address : NULL);
      Py_DECREF(addresses);
      return NULL;
    }
    Py_DECREF(PyTuple_GET_ITEM(addresses, place));
    PyTuple_SET_ITEM(addresses, place, address);
  }
  return addresses;
}

/* Launch every step with some values, and what adds up partial sums, if there are any: 0, and -1 with an exception. */
static int launch_steps(Laid *laid, PyObject *values, PyObject *sums, PyObject *pieces) {
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(laid->steps); ++at) {
    PyObject *step = PyTuple_GET_ITEM(laid->steps, at);
    PyObject *given[] = {PyTuple_GET_ITEM(step, 1), values};
    PyObject *nothing = PyObject_Vectorcall(PyTuple_GET_ITEM(step, 0), given, 2, NULL);
    if (nothing == NULL)
      return -1;
    Py_DECREF(nothing);
  }
  if (laid->finish == Py_None)
    return 0;
  Py_ssize_t count = PyTuple_GET_SIZE(sums);
  PyObject *told = PyTuple_New(2 * count + 1);
  if (told == NULL)
    return -1;
  for (Py_ssize_t at = 0; at < count; ++at) {
    PyTuple_SET_ITEM(told, at, Py_NewRef(PyTuple_GET_ITEM(pieces, at)));
    PyTuple_SET_ITEM(told, count + at, Py_NewRef(PyTuple_GET_ITEM(sums, at)));
  }
  PyTuple_SET_ITEM(told, 2 * count, Py_NewRef(laid->programs));
  PyObject *given[] = {PyTuple_GET_ITEM(laid->finish, 1), told};
  PyObject *nothing = PyObject_Vectorcall(PyTuple_GET_ITEM(laid->finish, 0), given, 2, NULL);
  Py_DECREF(told);
  Py_XDECREF(nothing);
  return nothing == NULL ? -1 : 0;
}

/* Where the parts of the memory that programs share begin, and that of what they exchange, which is nothing. */
static PyObject *pieces_of(Laid *laid, PyObject *work) {
  Py_ssize_t count = PyTuple_GET_SIZE(laid->offsets);
  PyObject *pieces = PyTuple_New(count + 1), *base = address_of(work);
  for (Py_ssize_t at = 0; pieces != NULL && base != NULL && at < count; ++at) {
    PyObject *piece = PyNumber_Add(base, PyTuple_GET_ITEM(laid->offsets, at));
    if (piece == NULL)
      Py_CLEAR(pieces);
    else
      PyTuple_SET_ITEM(pieces, at, piece);
  }
  if (base == NULL)
    Py_CLEAR(pieces);
  Py_XDECREF(base);
  if (pieces != NULL)
    PyTuple_SET_ITEM(pieces, count, Py_NewRef(zero));
  return pieces;
}

/* A new vector, or None where a plan has no dtype for it. */
static PyObject *allocate_vector(PyObject *plan, PyObject *length, PyObject *dtype) {
  if (dtype == Py_None)
    return Py_NewRef(Py_None);
  PyObject *size = PyTuple_Pack(1, length), *strides = PyTuple_Pack(1, one), *vector = NULL;
  if (size != NULL && strides != NULL)
    vector = allocate(plan, size, strides, dtype);
  Py_XDECREF(size);
  Py_XDECREF(strides);
  return vector;
}

static PyObject *address_or_zero(PyObject *tensor) { return address_of(tensor == Py_None ? NULL : tensor); }

/* Allocate what a plan returns, launch, and return it: dx, what is summed over rows, and None for what a dropout has. */
static PyObject *run_back(Calls *self, PyObject *plan, Laid *laid, PyObject *addresses, PyObject *shape, PyObject *m,
                          PyObject *offset) {
  PyObject *dtypes = PyObject_GetAttr(plan, dtypes_name), *sum_dtypes = PyObject_GetAttr(plan, sum_dtypes_name);
  PyObject *size = NULL, *strides = NULL, *work = NULL, *made = NULL, *at_sums = NULL, *pieces = NULL, *values = NULL;
  int done = 0;
  if (dtypes == NULL || sum_dtypes == NULL)
    goto end;
  if (!PyTuple_Check(dtypes) || !PyTuple_Check(sum_dtypes) || PyTuple_GET_SIZE(dtypes) == 0 ||
      PyTuple_GET_SIZE(sum_dtypes) > PyTuple_GET_SIZE(laid->offsets)) {
    PyErr_SetString(PyExc_TypeError, "the dtypes of a plan are tuples, of no more sums than there is memory for");
    goto end;
  }
  Py_ssize_t sums = PyTuple_GET_SIZE(sum_dtypes), read = PyTuple_GET_SIZE(addresses);
  PyObject *dx_dtype = PyTuple_GET_ITEM(dtypes, 0), *n = PyTuple_GET_ITEM(shape, PyTuple_GET_SIZE(shape) - 1);
  if ((made = PyTuple_New(sums + 2)) == NULL || (at_sums = PyTuple_New(sums)) == NULL)
    goto end;
  PyTuple_SET_ITEM(made, sums + 1, Py_NewRef(Py_None));
  if (dx_dtype != Py_None && lay_out(shape, &size, &strides) < 0)
    goto end;
  PyObject *dx = dx_dtype == Py_None ? Py_NewRef(Py_None) : allocate(plan, size, strides, dx_dtype);
  if (dx == NULL)
    goto end;
  PyTuple_SET_ITEM(made, 0, dx);
  for (Py_ssize_t at = 0; at < sums; ++at) {
    PyObject *sum = allocate_vector(plan, n, PyTuple_GET_ITEM(sum_dtypes, at));
    if (sum == NULL)
      goto end;
    PyTuple_SET_ITEM(made, 1 + at, sum);
    PyObject *address = address_or_zero(sum);
    if (address == NULL)
      goto end;
    PyTuple_SET_ITEM(at_sums, at, address);
  }
  int shares = PyObject_IsTrue(laid->length);
  if (shares < 0 || (shares && (work = allocate_vector(plan, laid->length, self->held[PACKED_DTYPE])) == NULL))
    goto end;
  if ((pieces = pieces_of(laid, work)) == NULL)
    goto end;
  Py_ssize_t parts = PyTuple_GET_SIZE(pieces);
  if ((values = PyTuple_New(read + 1 + parts + 2)) == NULL)
    goto end;
  for (Py_ssize_t at = 0; at < read; ++at)
    PyTuple_SET_ITEM(values, at, Py_NewRef(PyTuple_GET_ITEM(addresses, at)));
  PyObject *dx_at = address_or_zero(dx);
  if (dx_at == NULL)
    goto end;
  PyTuple_SET_ITEM(values, read, dx_at);
  for (Py_ssize_t at = 0; at < parts; ++at)
    PyTuple_SET_ITEM(values, read + 1 + at, Py_NewRef(PyTuple_GET_ITEM(pieces, at)));
  PyTuple_SET_ITEM(values, read + 1 + parts, Py_NewRef(m));
  PyTuple_SET_ITEM(values, read + 2 + parts, Py_NewRef(offset));
  done = launch_steps(laid, values, at_sums, pieces) == 0;
end:
  Py_XDECREF(dtypes);
  Py_XDECREF(sum_dtypes);
  Py_XDECREF(size);
  Py_XDECREF(strides);
  Py_XDECREF(work);
  Py_XDECREF(at_sums);
  Py_XDECREF(pieces);
  Py_XDECREF(values);
  if (!done)
    Py_CLEAR(made);
  return made;
}

/* The kinds of such a backward pass. */
static PyObject *look_up_back(Calls *self, PyObject *const *operands, PyObject *options, PyObject *n) {
  PyObject *parts[] = {
      gradients_word,
      PyTuple_GET_ITEM(options, BWD_NORM),
      n,
      operands[BWD_DY] == Py_None ? Py_True : Py_False,
      operands[BWD_WEIGHT] == Py_None ? Py_True : Py_False,
      operands[BWD_X_BIAS] == Py_None ? Py_True : Py_False,
      operands[BWD_DRESIDUAL_OUT] == Py_None ? Py_True : Py_False,
      PyTuple_GET_ITEM(options, BWD_CAST),
      PyTuple_GET_ITEM(options, BWD_DX_DTYPE),
      PyTuple_GET_ITEM(options, BWD_BIAS_DTYPE),
      PyTuple_GET_ITEM(options, BWD_WANTS),
  };
  Py_ssize_t count = (Py_ssize_t)(sizeof(parts) / sizeof(*parts));
  PyObject *key = PyTuple_New(count);
  for (Py_ssize_t at = 0; key != NULL && at < count; ++at)
    PyTuple_SET_ITEM(key, at, Py_NewRef(parts[at]));
  return kinds_of(self, key);
}

/* The gradients of a call that is known, of whose x this is the shape; NULL if it is another call, or an exception says
 * why. `runs` says whether it was found to be known, so that the exception is the caller's to see. */
static PyObject *gradients_of(Calls *self, PyObject *const *operands, PyObject *options, PyObject *shape, int *runs) {
  Py_ssize_t dimensions = PyTuple_GET_SIZE(shape), rows = count_rows(shape);
  PyObject *n = PyTuple_GET_ITEM(shape, dimensions - 1);
  if (rows < 0 || !PyLong_CheckExact(n))
    return NULL;
  if (dimensions != 2 && (is_contiguous(operands[BWD_X]) <= 0 || is_contiguous(operands[BWD_DY]) <= 0 ||
                          is_contiguous(operands[BWD_DRESIDUAL_OUT]) <= 0))
    return NULL;
  PyObject *kinds = look_up_back(self, operands, options, n);
  PyObject *kind = kinds == NULL ? NULL : fitting(kinds, operands, BWD_OPERANDS);
  Py_XDECREF(kinds);
  if (kind == NULL)
    return NULL;
  PyObject *plan = NULL, *m = NULL, *addresses = NULL, *made = NULL;
  Laid laid = {NULL, NULL, NULL, NULL, NULL};
  if (is_unwatched(self) > 0 && has_shape(operands[BWD_DY], shape) > 0 &&
      has_shape(operands[BWD_DRESIDUAL_OUT], shape) > 0 && (plan = PyObject_GetAttr(kind, plan_name)) != NULL &&
      plan != Py_None && (m = PyLong_FromSsize_t(rows)) != NULL &&
      (addresses = arriving_addresses(self, operands, PyTuple_GET_ITEM(options, BWD_NORM), m)) != NULL) {
    *runs = 1;
    if (lay_out_rows(plan, m, &laid) > 0)
      made = run_back(self, plan, &laid, addresses, shape, m, PyTuple_GET_ITEM(options, BWD_WEIGHT_OFFSET));
  }
  drop(&laid);
  Py_DECREF(kind);
  Py_XDECREF(plan);
  Py_XDECREF(m);
  Py_XDECREF(addresses);
  return made;
}

static PyObject *gradients(PyObject *object, PyObject *const *args, Py_ssize_t given) {
  Calls *self = (Calls *)object;
  if (given != 2 || !PyTuple_Check(args[0]) || !PyTuple_Check(args[1]) || PyTuple_GET_SIZE(args[0]) != BWD_OPERANDS ||
      PyTuple_GET_SIZE(args[1]) != BWD_OPTIONS) {
    PyErr_SetString(PyExc_TypeError, "gradients are looked up by what arrives, and by options");
    return NULL;
  }
  PyObject *const *operands = &PyTuple_GET_ITEM(args[0], 0);
  PyObject *shape = PyObject_GetAttr(operands[BWD_X], shape_name), *made = NULL;
  int runs = 0;
  if (shape != NULL && PyTuple_Check(shape) && PyTuple_GET_SIZE(shape) > 0)
    made = gradients_of(self, operands, args[1], shape, &runs);
  Py_XDECREF(shape);
  if (made != NULL) {
    PyObject *found = PyTuple_Pack(2, Py_None, made);
    Py_DECREF(made);
    return found;
  }
  if (PyErr_Occurred()) {
    if (runs || !PyErr_ExceptionMatches(self->held[UNREADABLE]))
      return NULL;
    PyErr_Clear();
  }
  PyObject *passed[] = {self->held[OTHERWISE], args[0], args[1]};
  return PyObject_VectorcallMethod(gradients_name, passed, 3, NULL);
}
