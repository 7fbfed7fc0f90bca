/* The module of known calls: what `Calls` is made of, its methods, and the names that all of it asks by. */

static void dealloc(PyObject *object) {
  for (size_t at = 0; at < HELD; ++at)
    Py_XDECREF(((Calls *)object)->held[at]);
  Py_TYPE(object)->tp_free(object);
}

/* Whether every place is one of so many; an exception says so if not. */
static int are_within(PyObject *places, Py_ssize_t width) {
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(places); ++at) {
    Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(places, at));
    if (place < 0 || place >= width) {
      PyErr_Format(PyExc_ValueError, "place %zd of %zd", place, width);
      return 0;
    }
  }
  return 1;
}

/* All that it holds are functions, modules and constants that outlive it: garbage collection has no part in it. */
static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *names) {
  static char *known[] = {
      "otherwise",       "places",         "apply",       "apply_add",  "plain",        "dispatch",        "forward_ad",
      "is_grad_enabled", "dispatch_modes", "default_eps", "unreadable", "packed_dtype", "gradient_places", "rstd_address",
      "largest",         "width",          "misaligned",  "gradient_width", "mean_place", NULL};
  PyObject *held[HELD];
  double largest;
  Py_ssize_t width, misaligned, gradient_width, mean_place;
  if (!PyArg_ParseTupleAndKeywords(args, names, "OO!OOO!OOOOOOOO!Odnnnn", known, &held[OTHERWISE], &PyTuple_Type, &held[PLACES],
                                   &held[APPLY], &held[APPLY_ADD], &PyFrozenSet_Type, &held[PLAIN], &held[DISPATCH],
                                   &held[FORWARD_AD], &held[IS_GRAD_ENABLED], &held[DISPATCH_MODES], &held[DEFAULT_EPS],
                                   &held[UNREADABLE], &held[PACKED_DTYPE], &PyTuple_Type, &held[GRADIENT_PLACES],
                                   &held[RSTD_ADDRESS], &largest, &width, &misaligned, &gradient_width, &mean_place))
    return NULL;
  Py_ssize_t count = PyTuple_GET_SIZE(held[PLACES]);
  if (count <= RESIDUAL || count > MOST_OPERANDS) {
    PyErr_Format(PyExc_ValueError, "%zd operands, of at most %d", count, MOST_OPERANDS);
    return NULL;
  }
  if (PyTuple_GET_SIZE(held[GRADIENT_PLACES]) != BWD_OPERANDS || mean_place < 0 || mean_place >= gradient_width) {
    PyErr_Format(PyExc_ValueError, "of a backward pass %zd places of %d, and means at %zd of %zd",
                 PyTuple_GET_SIZE(held[GRADIENT_PLACES]), BWD_OPERANDS, mean_place, gradient_width);
    return NULL;
  }
  if (!are_within(held[PLACES], width) || !are_within(held[GRADIENT_PLACES], gradient_width))
    return NULL;
  Calls *self = (Calls *)type->tp_alloc(type, 0);
  if (self == NULL)
    return NULL;
  for (size_t at = 0; at < HELD; ++at)
    self->held[at] = Py_NewRef(held[at]);
  self->largest = largest;
  self->width = width;
  self->misaligned = misaligned;
  self->gradient_width = gradient_width;
  self->mean_place = mean_place;
  return (PyObject *)self;
}

static PyMethodDef methods[] = {
    {"normalise", (PyCFunction)(void (*)(void))normalise, METH_FASTCALL, "A call, from its arguments to its results."},
    {"gradients", (PyCFunction)(void (*)(void))gradients, METH_FASTCALL, "No key, and the gradients of a call."},
    {"run_recorded_alone", run_recorded_alone, METH_O, "y and the statistics of a call that was found."},
    {"run_recorded_added", run_recorded_added, METH_O, "y, the sum and the statistics."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject CallsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "normforge_known_calls.Calls",
    .tp_doc = "Finds and launches the calls that are known to a module of plans.",
    .tp_basicsize = sizeof(Calls),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = make,
    .tp_dealloc = dealloc,
    .tp_methods = methods,
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "normforge_known_calls",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit_normforge_known_calls(void) {
  const struct {
    PyObject **name;
    const char *text;
  } names[] = {
      {&shape_name, "shape"},
      {&data_ptr_name, "data_ptr"},
      {&contiguous_name, "is_contiguous"},
      {&plans_name, "plans"},
      {&fits_name, "fits"},
      {&plan_name, "plan"},
      {&trains_name, "trains"},
      {&level_name, "_current_level"},
      {&forward_name, "forward"},
      {&empty_name, "empty"},
      {&dtypes_name, "dtypes"},
      {&recorded_word, "recorded"},
      {&rms_word, "rms"},
      {&normalise_name, "normalise"},
      {&gradients_name, "gradients"},
      {&layout_name, "layout"},
      {&sum_dtypes_name, "sum_dtypes"},
      {&steps_name, "steps"},
      {&finish_name, "finish"},
      {&programs_name, "programs"},
      {&offsets_name, "offsets"},
      {&length_name, "length"},
      {&exchange_name, "exchange"},
      {&by_address_name, "by_address"},
      {&gradients_word, "recorded bwd"},
      {&layer_word, "layer"},
      {&alone_name, "run_alone"},
      {&added_name, "run_added"},
      {&recorded_alone_name, "run_recorded_alone"},
      {&recorded_added_name, "run_recorded_added"},
  };
  for (size_t at = 0; at < sizeof(names) / sizeof(*names); ++at)
    if ((*names[at].name = PyUnicode_InternFromString(names[at].text)) == NULL)
      return NULL;
  if ((zero = PyLong_FromLong(0)) == NULL || (one = PyLong_FromLong(1)) == NULL)
    return NULL;
  PyObject *module = PyModule_Create(&definition);
  if (module != NULL && PyModule_AddType(module, &CallsType) < 0)
    Py_CLEAR(module);
  return module;
}
