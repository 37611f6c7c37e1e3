// PJRT_LoadedExecutable_Execute without the interpreter, for Programs that are one executable of the CPU client underneath (shim.py).
//
// It does what `Loaded.launch` does from the second launch on; what it does not know is left to the entry in Python. CPython's functions are
// declared here as far as they are used, all of its stable ABI, so that no headers of it are needed: a compiler is enough.

#include <stddef.h>
#include <stdint.h>

typedef struct _object PyObject;
extern int PyGILState_Ensure(void);
extern void PyGILState_Release(int);
extern void Py_IncRef(PyObject *);
extern void Py_DecRef(PyObject *);
extern PyObject *PyObject_CallFunctionObjArgs(PyObject *, ...);
extern PyObject *PyObject_CallMethodObjArgs(PyObject *, PyObject *, ...);
extern PyObject *PyObject_GetAttr(PyObject *, PyObject *);
extern int PyObject_IsTrue(PyObject *);
extern PyObject *PyDict_GetItemWithError(PyObject *, PyObject *);
extern PyObject *PyList_New(ptrdiff_t);
extern int PyList_Append(PyObject *, PyObject *);
extern int PyList_SetItem(PyObject *, ptrdiff_t, PyObject *);
extern PyObject *PyList_GetItem(PyObject *, ptrdiff_t);
extern ptrdiff_t PyList_Size(PyObject *);
extern PyObject *PyLong_FromUnsignedLongLong(unsigned long long);
extern unsigned long long PyLong_AsUnsignedLongLong(PyObject *);
extern ptrdiff_t PyDict_Size(PyObject *);
extern int PyDict_DelItem(PyObject *, PyObject *);
extern PyObject *PyErr_Occurred(void);
extern void PyErr_Clear(void);
extern void PyErr_Fetch(PyObject **, PyObject **, PyObject **);
extern void PyErr_NormalizeException(PyObject **, PyObject **, PyObject **);
extern int PyException_SetTraceback(PyObject *, PyObject *);

typedef uint64_t word;
typedef word *(*entry)(word *);

struct state {  // shim.State
  entry in_python;
  word *list;  // the head of the list of what C has destroyed
  PyObject *objects, *arrays, *references, *shared, *shutdown;
  PyObject *begun, *consume, *destroyed;  // names
  int64_t launch, deleted;  // the words of a header: of an executable its `struct launch`, of a buffer whether it is deleted
  word ready;               // the handle of every event
} state;

struct launch {  // shim.Launch
  PyObject *execute, *handlers, *zero, *check, *given, *failed;
  int64_t count, donations;
  const int64_t *order;    // of each array that the executable takes, its place among the arguments; -1: `zero`
  const int64_t *donated;  // the places of donated arguments
};

// Removes a handle from a table, and appends it to a list if it was there. Returns whether that went well.
static int moved(PyObject *handle, PyObject *table, PyObject *list) {
  if (!PyDict_GetItemWithError(table, handle)) return !PyErr_Occurred();
  return !PyDict_DelItem(table, handle) && !PyList_Append(list, handle);
}

// Handles of one object that C has destroyed, and those of them that had an array.
struct run {
  PyObject *object, *gone, *held;
};

// Tells the object, and forgets the run.
static int told(struct run *run) {
  PyObject *done = run->held ? PyObject_CallMethodObjArgs(run->object, state.destroyed, run->gone, run->held, NULL) : NULL;
  Py_DecRef(run->object);
  Py_DecRef(run->gone);
  Py_DecRef(run->held);
  Py_DecRef(done);
  *run = (struct run){0};
  return done != NULL;
}

// What `handles.collect` does: forgets the objects that C has destroyed since the last call.
static int collect(void) {
  word header = __atomic_exchange_n(state.list, 0, __ATOMIC_ACQ_REL);
  struct run run = {0};
  int well = 1;
  while (well && header) {
    PyObject *handle = PyLong_FromUnsignedLongLong(header), *object = handle ? PyDict_GetItemWithError(state.objects, handle) : NULL;
    header = *(word *)header;
    if (object && object != run.object) {
      if (run.object) well = told(&run);
      Py_IncRef(object);
      run = (struct run){object, PyList_New(0), PyList_New(0)};
    }
    if (object) well = well && run.gone && run.held && moved(handle, state.objects, run.gone) && moved(handle, state.arrays, run.held);
    Py_DecRef(handle);
  }
  if (run.object) well = told(&run) && well;
  return well && !PyErr_Occurred();
}

// The arrays that the executable takes; NULL if one is deleted.
static PyObject *gathered(const struct launch *launch, const word *arguments) {
  PyObject *arrays = PyList_New(launch->count);
  for (int64_t i = 0; arrays && i < launch->count; i++) {
    PyObject *array = launch->zero;
    if (launch->order[i] >= 0) {
      PyObject *handle = PyLong_FromUnsignedLongLong(arguments[launch->order[i]]);
      array = handle ? PyDict_GetItemWithError(state.arrays, handle) : NULL;
      Py_DecRef(handle);
    }
    if (!array) {
      PyErr_Clear();
      Py_DecRef(arrays);
      return NULL;
    }
    Py_IncRef(array);
    PyList_SetItem(arrays, i, array);
  }
  return arrays;
}

// Marks donated arguments as deleted, and lists them. Returns 0, with nothing marked, if one is given twice, or might be somebody else's too.
static int consume(const struct launch *launch, const word *arguments, PyObject *consumed) {
  if (!launch->donations) return 1;
  if (PyDict_Size(state.references) || PyDict_Size(state.shared)) return 0;
  for (int64_t i = 0; i < launch->donations; i++) {
    word *header = (word *)arguments[launch->donated[i]];
    PyObject *handle = header[state.deleted] ? NULL : PyLong_FromUnsignedLongLong((word)header);
    if (!handle || PyList_Append(consumed, handle)) {
      PyErr_Clear();
      Py_DecRef(handle);
      while (i--) ((word *)arguments[launch->donated[i]])[state.deleted] = 0;
      return 0;
    }
    header[state.deleted] = 1;
    Py_DecRef(handle);
  }
  return 1;
}

// Whether the memory has room; if not, a Python exception is set.
static int fits(const struct launch *launch) {
  PyObject *done = PyObject_CallFunctionObjArgs(launch->check, NULL);
  Py_DecRef(done);
  return done != NULL;
}

// The handles of the results, in a list; NULL with a Python exception.
static PyObject *launched(const struct launch *launch, PyObject *arrays, PyObject *consumed) {
  PyObject *running = PyObject_CallFunctionObjArgs(launch->execute, arrays, NULL);
  PyObject *results = running ? PyObject_CallMethodObjArgs(running, state.consume, launch->handlers, NULL) : NULL;
  PyObject *handles = results ? PyObject_CallFunctionObjArgs(launch->given, results, consumed, NULL) : NULL;
  Py_DecRef(running);
  Py_DecRef(results);
  return handles;
}

// Writes them where C wants them; there is no error.
static word *give(PyObject *handles, const word *args) {
  word *results = ((word **)args[7])[0], *events = (word *)args[8];
  for (ptrdiff_t i = 0, count = PyList_Size(handles); i < count; i++) results[i] = PyLong_AsUnsignedLongLong(PyList_GetItem(handles, i));
  if (events) events[0] = state.ready;
  return NULL;
}

// The handle of the PJRT_Error of the Python exception that is set.
static word *failure(const struct launch *launch, PyObject *consumed) {
  PyObject *handle = NULL;
  while (!handle) {  // Ctrl-C may interrupt this, too
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace) PyException_SetTraceback(error, trace);
    handle = PyObject_CallFunctionObjArgs(launch->failed, error, consumed, NULL);
    Py_DecRef(type);
    Py_DecRef(error);
    Py_DecRef(trace);
  }
  word *found = (word *)PyLong_AsUnsignedLongLong(handle);
  Py_DecRef(handle);
  return found;
}

// Whether the process is about to end, when the entry in Python holds its caller.
static int closing(void) {
  PyObject *begun = PyObject_GetAttr(state.shutdown, state.begun);
  int found = !begun || PyObject_IsTrue(begun);
  Py_DecRef(begun);
  return found;
}

// PJRT_LoadedExecutable_Execute: words 2 to 8 are the executable, the options, and by device the arguments; how many devices and arguments
// there are; and by device the results and an event.
word *execute(word *args) {
  const struct launch *launch = (const struct launch *)((word *)args[2])[state.launch];
  int keeps = ((word *)args[3])[8] != 0;  // arguments whose donation is declined
  if (!launch || keeps) return state.in_python(args);
  int gil = PyGILState_Ensure();
  const word *arguments = ((word **)args[4])[0];
  PyObject *consumed = PyList_New(0), *arrays = NULL, *handles = NULL;
  word *error = NULL;
  int known = consumed && !closing();
  if (known && !(collect() && fits(launch))) {
    error = failure(launch, consumed);
  } else if (known && (arrays = gathered(launch, arguments)) && consume(launch, arguments, consumed)) {
    handles = launched(launch, arrays, consumed);
    error = handles ? give(handles, args) : failure(launch, consumed);
  } else {
    known = 0;
    PyErr_Clear();
  }
  Py_DecRef(handles);
  Py_DecRef(arrays);
  Py_DecRef(consumed);
  PyGILState_Release(gil);
  return known ? error : state.in_python(args);
}
