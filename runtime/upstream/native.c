/* The road of a known call in C: `Lookup` finds known calls of every family, and `Launch` launches compiled kernels.
 *
 * `Lookup` takes the steps of `Lookup` in calls/native.py, with the same table and plans; neither knows about norms.
 * `Lookup` reads tensors by their Python methods, and so compiles without torch. `Launch` prepares whatever is equal in
 * all launches of a kernel. The driver receives exactly the arguments that the launchers of Triton 3.6 and 3.7 pass, for
 * kernels without tensor descriptors, scratch memory and clusters, which `triton_launcher.py` selects. Types come from
 * the cuda.h that Triton ships, addresses of functions from the caller. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>

#include "cuda.h"

#define MOST_ARGUMENTS 64
#define MOST_NUMBERS 3
#define MOST_KEPT 256
/* The index of an argument that a function lacks. */
#define ABSENT 255

/* The fields of a look-up, by the names of `Table` and of `_in_c` of calls/native.py: objects, and numbers. */
#define EACH_OBJECT(use)                                                                                               \
  use(head) use(norm) use(looks) use(operands) use(in_vectors) use(words) use(coded) use(numbers) use(plans_of)        \
  use(plain) use(unreadable) use(forward_ad) use(dispatch_modes) use(is_grad_enabled) use(settled) use(may_write)      \
  use(increment_version) use(run) use(run_recorded) use(run_backward) use(output) use(otherwise) use(record)
#define EACH_INDEX(use)                                                                                                \
  use(arguments) use(inputs) use(x) use(samples) use(mean) use(rstd) use(dropout) use(wants) use(saves)                \
  use(misaligned)
#define AS_OBJECT(name) PyObject *name;
#define AS_INDEX(name) Py_ssize_t name;
typedef struct {
  PyObject_HEAD
  EACH_OBJECT(AS_OBJECT)
  EACH_INDEX(AS_INDEX)
} Lookup;

/* The names of attributes and methods of tensors, kinds and plans. */
#define EACH_NAME(use)                                                                                                 \
  use(shape) use(data_ptr) use(is_contiguous) use(numel) use(plans) use(get) use(fits) use(plan) use(plan_at)          \
  use(trains) use(_current_level) use(extents) use(at) use(empty) use(run) use(inputs) use(order) use(is_invariant)  \
  use(launch_enter_hook) use(launch_exit_hook) use(calls)
#define AS_NAME(name) static PyObject *name##_name;
EACH_NAME(AS_NAME)
static PyObject *zero, *one, *no_number;

/* The first fields of `Sized` and `Layout` of calls/plan.py. */
enum { LAYOUT, NUMBERS, MAKES, RECORDED, SIZED };
enum { STEPS, FINISH, ADDS, PROGRAMS, OFFSETS, MEMORY, SUMS, TO_RSTD, BY_ADDRESS, EXCHANGE, IN_C, LAID };

/* The ways to compare an operand's sizes with x's in each call, in the order of `LOOKS`. */
enum { ROWS, PER_ROW, SCALE, SAMPLES, GROUPS };

/* One call. `kept` owns every object that is made for the call; all other references are borrowed. When an object
 * cannot be made, `failed` is set with an exception, and every later step does nothing. */
typedef struct {
  PyObject **values, *norm, *records, *numbers[MOST_NUMBERS];
  PyObject *key, *shape, *kind, *plan, *m, *addresses, *const *sized, *const *layout;
  int failed, count, packs;
  Py_ssize_t numbered, results;
  /* The number of operands that are present, their places, and themselves. */
  size_t present;
  int place[MOST_ARGUMENTS];
  /* `values` is behind the first of `passed`: in a call of `otherwise` the key precedes the arguments. */
  PyObject *passed[1 + MOST_ARGUMENTS], *there[MOST_ARGUMENTS], *kept[MOST_KEPT];
} Call;

static void begin(Call *call, PyObject *norm) {
  memset(call, 0, offsetof(Call, place));
  call->values = call->passed + 1;
  call->norm = norm;
  call->key = Py_None;
}

/* End a call, and return a new reference to its result: NULL with an exception if the call failed. */
static PyObject *end(Call *call, PyObject *result) {
  result = call->failed ? NULL : Py_XNewRef(result);
  while (call->count > 0)
    Py_DECREF(call->kept[--call->count]);
  return result;
}

static PyObject *keep(Call *call, PyObject *made) {
  if (made != NULL && call->count < MOST_KEPT)
    return call->kept[call->count++] = made;
  if (made != NULL)
    PyErr_SetString(PyExc_SystemError, "a call makes more objects than native.c has room for");
  Py_XDECREF(made);
  call->failed = 1;
  return NULL;
}

static PyObject *get(Call *call, PyObject *object, PyObject *name) {
  return call->failed ? NULL : keep(call, PyObject_GetAttr(object, name));
}

static PyObject *ask(Call *call, PyObject *object, PyObject *name) {
  return call->failed ? NULL : keep(call, PyObject_CallMethodNoArgs(object, name));
}

static PyObject *apply(Call *call, PyObject *function, PyObject *const *args, size_t count) {
  return call->failed ? NULL : keep(call, PyObject_Vectorcall(function, args, count, NULL));
}

static PyObject *ask_of(Call *call, PyObject *object, PyObject *name, PyObject *argument) {
  return call->failed ? NULL : keep(call, PyObject_CallMethodOneArg(object, name, argument));
}

static PyObject *sum_of(Call *call, PyObject *a, PyObject *b) {
  return call->failed ? NULL : keep(call, PyNumber_Add(a, b));
}

static PyObject *tuple_of(Call *call, PyObject *const *items, Py_ssize_t count) {
  PyObject *made = call->failed ? NULL : PyTuple_New(count);
  for (Py_ssize_t at = 0; made != NULL && at < count; ++at)
    PyTuple_SET_ITEM(made, at, Py_NewRef(items[at]));
  return call->failed ? NULL : keep(call, made);
}

/* Return the items of a tuple that has at least so many. */
static PyObject *const *items_of(Call *call, PyObject *object, Py_ssize_t least) {
  if (!call->failed && (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) < least)) {
    PyErr_Format(PyExc_TypeError, "%R is no tuple of at least %zd", object, least);
    call->failed = 1;
  }
  return call->failed ? NULL : &PyTuple_GET_ITEM(object, 0);
}

static int is_yes(Call *call, PyObject *answer) {
  int yes = call->failed ? 0 : PyObject_IsTrue(answer);
  call->failed |= yes < 0;
  return yes > 0;
}

static int is_equal(Call *call, PyObject *a, PyObject *b) {
  int equal = call->failed ? 0 : PyObject_RichCompareBool(a, b, Py_EQ);
  call->failed |= equal < 0;
  return equal > 0;
}

/* Return the address of a tensor; 0 for None. */
static PyObject *address_of(Call *call, PyObject *tensor) {
  return tensor == Py_None ? zero : ask(call, tensor, data_ptr_name);
}

/* Return a number of a table's bytes, and an operand, or None for an absent one. */
static int number_at(PyObject *bytes, Py_ssize_t at) { return ((unsigned char *)PyBytes_AS_STRING(bytes))[at]; }

static PyObject *operand_at(Lookup *self, Call *call, Py_ssize_t at) {
  int argument = at < PyBytes_GET_SIZE(self->operands) ? number_at(self->operands, at) : ABSENT;
  return argument == ABSENT ? Py_None : call->values[argument];
}

/* Build the key of a call, and count the rows of x: 0 if x has no sizes. */
static int describe(Lookup *self, Call *call) {
  PyObject *parts[4 * MOST_ARGUMENTS];
  Py_ssize_t at = 4, rows = 1, last;
  long long mask = 0;
  int gaps = 0;
  call->shape = get(call, operand_at(self, call, self->x), shape_name);
  if (call->failed || !PyTuple_Check(call->shape) || (last = PyTuple_GET_SIZE(call->shape) - 1) < 0)
    return 0;
  PyObject *const *shape = &PyTuple_GET_ITEM(call->shape, 0);
  for (Py_ssize_t each = 0; each <= last; ++each) {
    if (!PyLong_CheckExact(shape[each]))
      return 0;
    rows *= each < last ? PyLong_AsSsize_t(shape[each]) : 1;
  }
  for (int each = 0; each < PyBytes_GET_SIZE(self->operands); ++each) {
    PyObject *tensor = operand_at(self, call, each);
    if (tensor == Py_None)
      continue;
    mask |= 1LL << each;
    call->place[call->present] = each;
    call->there[call->present++] = tensor;
    int look = number_at(self->looks, each);
    if (look == SCALE)
      parts[at++] = is_equal(call, ask(call, tensor, numel_name), one) ? Py_True : Py_False;
    /* A plan then depends on all sizes but the first, as row strides do. */
    gaps |= last != 1 && look <= SCALE && !is_yes(call, ask(call, tensor, is_contiguous_name));
  }
  parts[0] = self->head;
  parts[1] = call->norm;
  parts[2] = shape[last];
  parts[3] = keep(call, PyLong_FromLongLong(mask));
  if (call->records != NULL)
    parts[at++] = call->records;
  for (Py_ssize_t each = 0; each < PyBytes_GET_SIZE(self->words); ++each)
    parts[at++] = call->values[number_at(self->words, each)];
  for (Py_ssize_t each = 0; each < PyBytes_GET_SIZE(self->coded); ++each)
    parts[at++] = (PyObject *)Py_TYPE(call->values[number_at(self->coded, each)]);
  if (gaps || mask & self->samples) {
    parts[at++] = gaps ? Py_True : Py_False;
    parts[at++] = keep(call, PyTuple_GetSlice(call->shape, 1, last + 1));
  }
  call->key = tuple_of(call, parts, at);
  call->m = keep(call, PyLong_FromSsize_t(rows));
  return !call->failed;
}

/* Find the kind whose guard the tensors fit. */
static int find_kind(Lookup *self, Call *call) {
  PyObject *plans = get(call, self->plans_of, plans_name);
  PyObject *kinds = ask_of(call, plans, get_name, call->key);
  for (Py_ssize_t at = 0; !call->failed && PyTuple_Check(kinds) && at < PyTuple_GET_SIZE(kinds); ++at) {
    call->kind = PyTuple_GET_ITEM(kinds, at);
    if (is_yes(call, apply(call, get(call, call->kind, fits_name), call->there, call->present)))
      return 1;
  }
  return 0;
}

/* Return 1 if nothing watches what runs, and no gradient would be lost. */
static int is_unwatched(Lookup *self, Call *call) {
  PyObject *level = get(call, self->forward_ad, _current_level_name);
  if (call->failed || PyLong_AsLong(level) >= 0 || is_yes(call, apply(call, self->dispatch_modes, NULL, 0)))
    return 0;
  return self->norm == Py_None || !is_yes(call, get(call, call->kind, trains_name)) ||
         !is_yes(call, apply(call, self->is_grad_enabled, NULL, 0));
}

/* Return 1 if the numbers are within their limits, and numbers other than 0 come with the operand they need. */
static int are_numbers(Lookup *self, Call *call) {
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(self->numbers); ++at) {
    PyObject *const *row = &PyTuple_GET_ITEM(PyTuple_GET_ITEM(self->numbers, at), 0);
    long argument = PyLong_AsLong(row[0]), needs = PyLong_AsLong(row[1]);
    PyObject *value = argument == ABSENT ? no_number : call->values[argument];
    if (value == Py_None && (value = PyDict_GetItemWithError(row[5], call->norm)) == NULL)
      return 0;
    double number = PyFloat_CheckExact(value) ? PyFloat_AS_DOUBLE(value) : Py_NAN;
    if (!(PyFloat_AS_DOUBLE(row[2]) <= number && number <= PyFloat_AS_DOUBLE(row[3])))
      return 0;
    if (number != 0.0 && needs != ABSENT &&
        (call->values[needs] == Py_None || PySequence_Contains(row[4], call->norm) <= 0))
      return 0;
    /* Kernels without a dropout take no dropout_p. */
    if (number != 0.0 || argument != self->dropout)
      call->numbers[call->numbered++] = value;
  }
  return 1;
}

/* Return 1 if the sizes that a guard leaves open are those of x. */
static int are_sized(Lookup *self, Call *call) {
  Py_ssize_t dimensions = PyTuple_GET_SIZE(call->shape);
  PyObject *const *sizes = &PyTuple_GET_ITEM(call->shape, 0);
  for (size_t each = 0; each < call->present; ++each) {
    PyObject *tensor = call->there[each];
    int look = number_at(self->looks, call->place[each]);
    if (look > GROUPS || call->place[each] == self->x)
      continue;
    PyObject *shape = get(call, tensor, shape_name);
    PyObject *const *own = items_of(call, shape, 0);
    Py_ssize_t count = own == NULL ? 0 : PyTuple_GET_SIZE(shape), equal = 0;
    Py_ssize_t first = look == GROUPS ? dimensions - 2 : 0;
    if ((look == SCALE && is_equal(call, ask(call, tensor, numel_name), one)) || (look > SCALE && count == 1))
      continue;
    Py_ssize_t compared = look == ROWS ? dimensions : look <= SCALE ? dimensions - 1 : 1;
    if (count < compared || first < 0 || (look <= PER_ROW && count != compared))
      return 0;
    while (equal < compared && is_equal(call, own[equal], sizes[first + equal]))
      ++equal;
    if (equal < compared)
      return 0;
  }
  return !call->failed;
}

/* Find how calls of x's shape are launched: 0 if there are no rows. */
static int find_sized(Call *call, PyObject *of) {
  PyObject *sized = ask_of(call, of, at_name, call->shape);
  if (sized == Py_None)
    return 0;
  call->sized = items_of(call, sized, SIZED);
  call->layout = call->failed ? NULL : items_of(call, call->sized[LAYOUT], LAID);
  return !call->failed;
}

/* Find the plan of a kind for tensors at some addresses: None if there is no such plan. */
static PyObject *find_served(Lookup *self, Call *call, PyObject *const *at, size_t count) {
  unsigned long long bits = 0;
  for (size_t each = 0; !call->failed && each < count; ++each)
    bits |= PyLong_AsUnsignedLongLong(at[each]);
  int is_aligned = !(bits & (unsigned long long)self->misaligned);
  PyObject *served = get(call, call->kind, is_aligned ? plan_name : plan_at_name);
  return is_aligned ? served : apply(call, served, at, count);
}

/* Read the addresses of the operands, and find the plan for them. */
static int find_plan(Lookup *self, Call *call) {
  PyObject *at[MOST_ARGUMENTS], *vectors[MOST_ARGUMENTS];
  Py_ssize_t operands = PyBytes_GET_SIZE(self->operands);
  size_t count = 0;
  for (Py_ssize_t each = 0; each < operands; ++each) {
    PyObject *tensor = operand_at(self, call, each);
    at[each] = address_of(call, tensor);
    /* No known call has a tensor without memory. */
    if (tensor != Py_None && !is_yes(call, at[each]))
      return 0;
    if (number_at(self->in_vectors, each))
      vectors[count++] = at[each];
  }
  call->plan = find_served(self, call, vectors, count);
  if (call->failed || call->plan == Py_None)
    return 0;
  /* One tensor may hold the means, and rstd behind them. */
  if (self->rstd >= 0 && find_sized(call, call->plan) && at[self->mean] == zero &&
      is_yes(call, call->layout[TO_RSTD])) {
    at[self->mean] = at[self->rstd];
    at[self->rstd] = sum_of(call, at[self->rstd], call->layout[TO_RSTD]);
  }
  return (call->addresses = tuple_of(call, at, self->inputs)) != NULL;
}

/* Look a call up. Return 1 if the call is known, with whatever launches take; 0 if not, with a key if one exists. */
static int look_up(Lookup *self, Call *call) {
  /* Ask plain tensors alone: a proxy of torch.fx, for one, answers and records every question. */
  PyObject *x = operand_at(self, call, self->x);
  int known = PySet_Contains(self->plain, (PyObject *)Py_TYPE(x)) > 0 && describe(self, call) && find_kind(self, call);
  if (call->failed && PyErr_ExceptionMatches(self->unreadable)) {
    PyErr_Clear();
    call->failed = 0;
    call->key = Py_None;
    return 0;
  }
  return known && is_unwatched(self, call) && are_numbers(self, call) && are_sized(self, call) && find_plan(self, call);
}

/* Return the tensors that are read, for launches that take tensors. */
static PyObject *tensors_of(Lookup *self, Call *call) {
  PyObject *tensors[MOST_ARGUMENTS];
  for (Py_ssize_t at = 0; at < self->inputs; ++at)
    tensors[at] = operand_at(self, call, at);
  return tuple_of(call, tensors, self->inputs);
}

/* Return what launches in Python take of a call, a `PlannedCall`. */
static PyObject *planned_of(Lookup *self, Call *call) {
  PyObject *numbers = tuple_of(call, call->numbers, call->numbered);
  PyObject *planned[] = {call->plan, call->addresses, tensors_of(self, call), call->shape, call->m, numbers};
  return tuple_of(call, planned, 6);
}

/* Allocate a tensor of a size, strides and a dtype, or return None. */
static PyObject *allocate(Call *call, PyObject *empty, PyObject *make) {
  PyObject *const *asked = make == Py_None ? NULL : items_of(call, make, 3);
  return asked == NULL ? Py_None : apply(call, empty, asked, 3);
}

static void launch(Call *call, PyObject *step, PyObject *values) {
  PyObject *const *pair = items_of(call, step, 2);
  if (pair != NULL)
    apply(call, pair[0], (PyObject *[]){pair[1], values}, 2);
}

static PyObject *output_of(Lookup *self, Call *call, PyObject *const *results, Py_ssize_t count) {
  PyTypeObject *type = (PyTypeObject *)self->output;
  PyObject *made = call->failed ? NULL : keep(call, type->tp_alloc(type, count));
  for (Py_ssize_t at = 0; made != NULL && at < count; ++at)
    PyTuple_SET_ITEM(made, at, Py_NewRef(results[at]));
  return made;
}

/* Allocate the results of a call that are not `made` yet, and launch every step, and the kernel that adds up partial
 * sums, if there is one. The launches read `read` and the numbers. None follows the results. */
static void launch_steps(Call *call, PyObject *read, PyObject **made) {
  PyObject *values[MOST_ARGUMENTS], *added[MOST_ARGUMENTS], *empty = get(call, call->plan, empty_name);
  PyObject *const *layout = call->layout;
  PyObject *const *offsets = items_of(call, layout[OFFSETS], 0), *const *steps = items_of(call, layout[STEPS], 1);
  PyObject *const *own = items_of(call, call->sized[NUMBERS], 0), *const *inputs = items_of(call, read, 0);
  PyObject *makes = call->sized[call->packs ? RECORDED : MAKES], *const *each = items_of(call, makes, 0);
  if (call->failed)
    return;
  Py_ssize_t results = call->results = PyTuple_GET_SIZE(makes), sums = PyLong_AsSsize_t(layout[SUMS]), adds = 2;
  Py_ssize_t count = PyTuple_GET_SIZE(read);
  memcpy(values, inputs, (size_t)count * sizeof(*values));
  for (Py_ssize_t at = 0; at < results; ++at) {
    made[at] = made[at] == NULL ? allocate(call, empty, each[at]) : made[at];
    *(at < results - sums ? &values[count++] : &added[adds++]) = address_of(call, made[at]);
  }
  made[results] = Py_None;
  if (call->packs) {
    /* Without means, rstd takes their place. */
    values[count - 2] = is_yes(call, layout[TO_RSTD]) ? values[count - 1] : zero;
    values[count - 1] = sum_of(call, values[count - 1], layout[TO_RSTD]);
  }
  /* The addresses of the parts of the memory that programs share, and 0 for memory to exchange values through. */
  PyObject *base = address_of(call, allocate(call, empty, layout[MEMORY]));
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(layout[OFFSETS]); ++at)
    values[count++] = added[adds++] = sum_of(call, base, offsets[at]);
  values[count++] = zero;
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(call->sized[NUMBERS]); ++at)
    values[count++] = own[at];
  memcpy(values + count, call->numbers, (size_t)call->numbered * sizeof(*values));
  PyObject *given = tuple_of(call, values, count + call->numbered);
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(layout[STEPS]); ++at)
    launch(call, steps[at], given);
  if (layout[FINISH] != Py_None) {
    added[0] = layout[PROGRAMS];
    added[1] = zero;
    PyObject *all = tuple_of(call, added, adds);
    launch(call, layout[FINISH], apply(call, layout[ADDS], &all, 1));
  }
}

/* The first results of a forward call, and the most that there are. */
enum { Y, SUM, RESULTS = 5 };

/* Run a forward call, by `run` of launch.py unless `IN_C`. If the call `packs`, the last result holds the statistics of
 * the rows in one tensor, as autograd saves them. */
static PyObject *const *run_forward(Lookup *self, Call *call, int packs, PyObject **made) {
  PyObject *places[] = {operand_at(self, call, self->inputs), operand_at(self, call, self->inputs + 1)};
  if (!find_sized(call, call->plan) || !is_yes(call, call->layout[IN_C])) {
    PyObject *given[] = {planned_of(self, call), places[Y], places[SUM]};
    PyObject *all = apply(call, packs ? self->run_recorded : self->run, given, packs ? 1 : 3);
    PyObject *const *results = items_of(call, all, SUM + 1);
    call->results = results == NULL ? 0 : PyTuple_GET_SIZE(all);
    return results;
  }
  for (int at = 0; at <= SUM; ++at)
    /* Autograd may have saved a tensor that is written: the version shows the change. */
    if (places[at] != Py_None && apply(call, self->increment_version, &places[at], 1))
      made[at] = places[at];
  call->packs = packs;
  launch_steps(call, call->addresses, made);
  return call->failed ? NULL : made;
}

/* Run a backward call, by `run_backward` of launch.py with a dropout, or unless `IN_C`. */
static PyObject *run_backward(Lookup *self, Call *call) {
  PyObject *made[MOST_ARGUMENTS] = {NULL};
  if (call->numbered > 1 || !is_yes(call, call->layout[IN_C])) {
    PyObject *planned = planned_of(self, call);
    return apply(call, self->run_backward, &planned, 1);
  }
  launch_steps(call, call->addresses, made);
  return output_of(self, call, made, call->results + 1);
}

/* Run a backward call of rows in parts whose kind was found. Return None if there are no rows, or no plan. */
static PyObject *run_parts(Lookup *self, Call *call, PyObject *arrived) {
  PyObject *at[MOST_ARGUMENTS], *made[MOST_ARGUMENTS] = {NULL};
  Py_ssize_t count = PyTuple_GET_SIZE(arrived);
  for (Py_ssize_t each = 0; each < count; ++each)
    at[each] = address_of(call, PyTuple_GET_ITEM(arrived, each));
  PyObject *ready = find_served(self, call, at, (size_t)count);
  call->shape = get(call, PyTuple_GET_ITEM(arrived, 2), shape_name);
  if (call->failed || ready == Py_None || !find_sized(call, ready))
    return Py_None;
  if (!is_yes(call, call->layout[IN_C])) {
    PyObject *given[] = {arrived, tuple_of(call, at, count)};
    return apply(call, get(call, ready, run_name), given, 2);
  }
  /* The last tensor holds the means, if there are any, and rstd behind them. */
  at[count] = is_yes(call, call->layout[TO_RSTD]) ? at[count - 1] : zero;
  at[count + 1] = sum_of(call, at[count - 1], call->layout[TO_RSTD]);
  PyObject *all = tuple_of(call, at, count + 2);
  call->plan = get(call, ready, plan_name);
  launch_steps(call, apply(call, get(call, ready, inputs_name), &all, 1), made);
  PyObject *results = tuple_of(call, made, call->results + 1);
  return apply(call, get(call, ready, order_name), &results, 1);
}

/* Return 1 if a known forward call writes to nothing that it reads. */
static int may_write(Lookup *self, Call *call) {
  PyObject *out = operand_at(self, call, self->inputs), *residual_out = operand_at(self, call, self->inputs + 1);
  if (out == Py_None && residual_out == Py_None)
    return 1;
  PyObject *extents = get(call, call->plan, extents_name);
  PyObject *given[] = {extents, call->addresses, tensors_of(self, call), call->m, out, residual_out};
  return is_yes(call, apply(call, self->may_write, given, 6));
}

/* Settle the seed and offset of a dropout's mask before the look-up. */
static void settle(Lookup *self, Call *call) {
  if (self->dropout < 0)
    return;
  PyObject **p = &call->values[self->dropout], *given[] = {p[0], p[1], operand_at(self, call, self->x)};
  if (p[1] == Py_None && PyFloat_CheckExact(p[0]) && PyFloat_AS_DOUBLE(p[0]) == 0.0)
    return;
  PyObject *const *pair = items_of(call, apply(call, self->settled, given, 3), 2);
  if (pair != NULL)
    memcpy(p, pair, 2 * sizeof(*p));
}

/* Run a call of a function of one norm, given all its arguments in order. */
static PyObject *call(PyObject *object, PyObject *const *args, Py_ssize_t given) {
  Lookup *self = (Lookup *)object;
  PyObject *results[RESULTS + 1] = {NULL}, *made = NULL;
  Call call;
  if (given != self->arguments)
    return PyErr_Format(PyExc_TypeError, "%U takes %zd arguments, and not %zd", self->head, self->arguments, given);
  begin(&call, self->norm);
  memcpy(call.values, args, (size_t)given * sizeof(*args));
  settle(self, &call);
  if (!call.failed && self->wants >= 0 && PyList_CheckExact(call.values[self->wants]))
    call.values[self->wants] = keep(&call, PyList_AsTuple(call.values[self->wants]));
  if (!call.failed && look_up(self, &call) && may_write(self, &call)) {
    PyObject *const *forward = self->rstd >= 0 ? NULL : run_forward(self, &call, 0, results);
    made = self->rstd >= 0 ? run_backward(self, &call) : output_of(self, &call, forward, call.results);
  } else if (!call.failed) {
    call.passed[0] = call.key;
    made = apply(&call, self->otherwise, call.passed, (size_t)given + 1);
  }
  return end(&call, made);
}

/* Return 1 if a normalized_shape is x's last dimension. The class of the size counts too, because 64.0 equals 64. */
static int is_last(Call *call, PyObject *normalized) {
  PyObject *size = NULL;
  int is_shape = PyTuple_CheckExact(normalized) || PyList_CheckExact(normalized) ||
                 Py_IS_TYPE(normalized, Py_TYPE(call->shape));
  if (is_shape && PySequence_Fast_GET_SIZE(normalized) == 1)
    size = PySequence_Fast_GET_ITEM(normalized, 0);
  return size != NULL && PyLong_CheckExact(size) &&
         is_equal(call, size, PyTuple_GET_ITEM(call->shape, PyTuple_GET_SIZE(call->shape) - 1));
}

/* Look up a call, given a tuple of its operands, and a tuple of its norm and options. */
static int look_up_pair(Lookup *self, Call *call, PyObject *const *args, Py_ssize_t given) {
  begin(call, NULL);
  PyObject *const *operands = given < 2 ? NULL : items_of(call, args[0], 1);
  PyObject *const *options = given < 2 ? NULL : items_of(call, args[1], 1);
  Py_ssize_t count = options == NULL ? -1 : PyTuple_GET_SIZE(args[0]);
  if (call->failed || count < 0 || count + PyTuple_GET_SIZE(args[1]) != self->arguments + 1) {
    PyErr_Format(PyExc_TypeError, "a %U call is looked up by two tuples, of its operands and its options", self->head);
    call->failed = 1;
    return 0;
  }
  memcpy(call->values, operands, (size_t)count * sizeof(*operands));
  memcpy(call->values + count, options + 1, (size_t)(self->arguments - count) * sizeof(*options));
  call->norm = options[0];
  /* Only autograd knows whether a gradient is due. */
  if (self->saves == self->arguments || (self->saves >= 0 && call->values[self->saves] == Py_None))
    call->records = is_yes(call, apply(call, self->is_grad_enabled, NULL, 0)) ? Py_True : Py_False;
  return !call->failed && look_up(self, call);
}

static int is_recorded(Call *call) {
  return call->records == Py_True && is_yes(call, get(call, call->kind, trains_name));
}

/* Return the key, or None; whether a gradient is due; and what launches in Python take, or None. */
static PyObject *find(PyObject *object, PyObject *const *args, Py_ssize_t given) {
  Lookup *self = (Lookup *)object;
  Call call;
  int known = look_up_pair(self, &call, args, given);
  PyObject *records = known && is_recorded(&call) ? Py_True : Py_False;
  PyObject *made[] = {call.key, records, known ? planned_of(self, &call) : Py_None};
  return end(&call, tuple_of(&call, made, 3));
}

/* Return y of a known call, or y and the sum if there is one, recorded where a gradient is due. Return None for any
 * other call, and for a call with a normalized_shape that is not x's last dimension. */
static PyObject *normalise(PyObject *object, PyObject *const *args, Py_ssize_t given) {
  Lookup *self = (Lookup *)object;
  PyObject *made[RESULTS + 1] = {NULL}, *found = Py_None;
  Call call;
  int known = look_up_pair(self, &call, args, given);
  if (known && (given < 3 || is_last(&call, args[2]))) {
    int records = is_recorded(&call);
    PyObject *const *results = run_forward(self, &call, records, made);
    if (records && results != NULL) {
      PyObject *statistics = results[call.results - 1];
      PyObject *kept[] = {results[Y], results[SUM], statistics, get(&call, call.plan, is_invariant_name)};
      PyObject *passed[] = {args[0], args[1], tuple_of(&call, kept, 4)};
      found = apply(&call, self->record, passed, 3);
    } else if (results != NULL)
      found = results[SUM] == Py_None ? results[Y] : tuple_of(&call, results, 2);
  }
  return end(&call, found);
}

/* Return the key of a backward pass, or None, and the gradients, or None if the pass is not known. */
static PyObject *gradients(PyObject *object, PyObject *const *args, Py_ssize_t given) {
  Lookup *self = (Lookup *)object;
  Call call;
  int known = look_up_pair(self, &call, args, given);
  PyObject *made[] = {call.key, known ? run_backward(self, &call) : Py_None};
  return end(&call, tuple_of(&call, made, 2));
}

/* Return the key of a backward pass whose rows are in parts, and the gradients, or None if no pass is like it. */
static PyObject *known_gradients(PyObject *object, PyObject *const *args, Py_ssize_t given) {
  Lookup *self = (Lookup *)object;
  Call call;
  begin(&call, NULL);
  PyObject *const *arrived = given == 3 ? items_of(&call, args[0], 3) : NULL;
  if (arrived == NULL)
    return PyErr_Format(PyExc_TypeError, "a %U call is looked up by tensors, arguments and what is due", self->head);
  for (Py_ssize_t each = 0; each < PyTuple_GET_SIZE(args[0]); ++each)
    if (arrived[each] != Py_None)
      call.there[call.present++] = arrived[each];
  PyObject *key[] = {self->head, args[1], args[2], arrived[1] == Py_None ? Py_True : Py_False};
  call.key = tuple_of(&call, key, 4);
  PyObject *made[] = {call.key, find_kind(self, &call) ? run_parts(self, &call, args[0]) : Py_None};
  return end(&call, tuple_of(&call, made, 2));
}

#define RELEASE(name) Py_XDECREF(self->name);
static void dealloc(PyObject *object) {
  Lookup *self = (Lookup *)object;
  EACH_OBJECT(RELEASE)
  Py_TYPE(object)->tp_free(object);
}

/* A look-up holds functions, modules and constants that outlive it, and takes no part in garbage collection. */
#define TAKE_OBJECT(name)                                                                                              \
  self->name = Py_XNewRef(PyDict_GetItemString(named, #name));                                                         \
  missing = self->name == NULL ? #name : missing;
#define TAKE_INDEX(name)                                                                                               \
  self->name = (value = PyDict_GetItemString(named, #name)) == NULL ? 0 : PyLong_AsSsize_t(value);                     \
  missing = value == NULL ? #name : missing;
static PyObject *make(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *named) {
  Lookup *self = (Lookup *)type->tp_alloc(type, 0);
  const char *missing = named == NULL ? "names" : NULL;
  PyObject *value;
  if (self != NULL && missing == NULL) {
    EACH_OBJECT(TAKE_OBJECT)
    EACH_INDEX(TAKE_INDEX)
  }
  if (missing != NULL || (self != NULL && self->arguments > MOST_ARGUMENTS / 2)) {
    PyErr_Format(PyExc_TypeError, "a look-up is made without %s", missing ? missing : "room for so many arguments");
    Py_CLEAR(self);
  }
  return (PyObject *)self;
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    FAST(call),
    FAST(find),
    FAST(normalise),
    FAST(gradients),
    FAST(known_gradients),
    {NULL, NULL, 0, NULL},
};

static PyTypeObject LookupType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "normforge_native.Lookup",
    .tp_basicsize = sizeof(Lookup),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = make,
    .tp_dealloc = dealloc,
    .tp_methods = methods,
};

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
#define EACH_HELD(use) use(device) use(current_stream) use(hooks) use(enter) use(leave) use(observed)
typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Driver driver;
  CUfunction function;
  /* All but the grid and the stream of a launch. */
  CUlaunchConfig config;
  CUlaunchAttribute attributes[2];
  int ordinal;
  EACH_HELD(AS_OBJECT)
  Py_ssize_t n_values, count;
  Parameter parameters[MOST_PARAMETERS];
} Launch;

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

static PyObject *launch_kernel(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
  Launch *self = (Launch *)callable;
  if (PyVectorcall_NARGS(flags) != 2 || (names != NULL && PyTuple_GET_SIZE(names) != 0))
    return PyErr_Format(PyExc_TypeError, "a launch takes a grid and values");
  int quiet = is_quiet(self->hooks, launch_enter_hook_name, self->enter);
  if (quiet > 0)
    quiet = is_quiet(self->hooks, launch_exit_hook_name, self->leave);
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

#define HOLD_OBJECT(name) self->name = Py_NewRef(name);
static PyObject *make_launch(PyTypeObject *type, PyObject *args, PyObject *names) {
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
  self->vectorcall = launch_kernel;
  self->function = (CUfunction)(uintptr_t)function;
  self->config = (CUlaunchConfig){.blockDimX = (unsigned)threads, .blockDimY = 1, .blockDimZ = 1,
                                  .sharedMemBytes = (unsigned)shared, .attrs = self->attributes};
  self->ordinal = (int)ordinal;
  self->n_values = n_values;
  if (pdl)
    self->attributes[self->config.numAttrs++] = early;
  if (cooperative)
    self->attributes[self->config.numAttrs++] = together;
  EACH_HELD(HOLD_OBJECT)
  if (read_parameters(self, parameters) < 0)
    Py_CLEAR(self);
  return (PyObject *)self;
}

/* A launch is immutable, as tuples are, so that cycles are broken elsewhere: there is no tp_clear. */
#define VISIT(name) Py_VISIT(self->name);
static int traverse(PyObject *object, visitproc visit, void *arg) {
  Launch *self = (Launch *)object;
  EACH_HELD(VISIT)
  return 0;
}

static void dealloc_launch(PyObject *object) {
  Launch *self = (Launch *)object;
  PyObject_GC_UnTrack(object);
  EACH_HELD(RELEASE)
  Py_TYPE(object)->tp_free(object);
}

static PyTypeObject LaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "normforge_native.Launch",
    .tp_doc = "Launches a kernel on the current stream, given a grid of three ints and a tuple of values.",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = make_launch,
    .tp_dealloc = dealloc_launch,
    .tp_traverse = traverse,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Launch, vectorcall),
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "normforge_native", .m_size = -1};

#define INTERN(name)                                                                                                   \
  if ((name##_name = PyUnicode_InternFromString(#name)) == NULL)                                                       \
    return NULL;
PyMODINIT_FUNC PyInit_normforge_native(void) {
  EACH_NAME(INTERN)
  if ((zero = PyLong_FromLong(0)) == NULL || (one = PyLong_FromLong(1)) == NULL ||
      (no_number = PyFloat_FromDouble(0.0)) == NULL)
    return NULL;
  PyObject *module = PyModule_Create(&definition);
  if (module != NULL && (PyModule_AddType(module, &LookupType) < 0 || PyModule_AddType(module, &LaunchType) < 0))
    Py_CLEAR(module);
  return module;
}
