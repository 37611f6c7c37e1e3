// Two entries without the interpreter (shim.py): PJRT_LoadedExecutable_Execute, for Programs that are one executable of the CPU client
// underneath, does what `Loaded.launch` does from the second launch on; and PJRT_Buffer_ToHostBuffer.
//
// What they do not know is left to the entries in Python. CPython's functions are declared here as far as they are used, all of its stable
// ABI, so that no headers of it are needed: a compiler is enough.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct _object PyObject;
extern int PyGILState_Ensure(void);
extern void PyGILState_Release(int);
extern void Py_IncRef(PyObject *);
extern void Py_DecRef(PyObject *);
extern PyObject *PyObject_CallFunctionObjArgs(PyObject *, ...);
extern PyObject *PyObject_CallMethodObjArgs(PyObject *, PyObject *, ...);
extern PyObject *PyObject_GetAttr(PyObject *, PyObject *);
extern int PyObject_IsTrue(PyObject *);
extern PyObject *PyList_New(ptrdiff_t);
extern int PyList_Append(PyObject *, PyObject *);
extern int PyList_SetItem(PyObject *, ptrdiff_t, PyObject *);
extern PyObject *PyList_GetItem(PyObject *, ptrdiff_t);
extern ptrdiff_t PyList_Size(PyObject *);
extern ptrdiff_t PyDict_Size(PyObject *);
extern int PyDict_DelItem(PyObject *, PyObject *);
extern PyObject *PyLong_FromLongLong(long long);
extern PyObject *PyLong_FromUnsignedLongLong(unsigned long long);
extern unsigned long long PyLong_AsUnsignedLongLong(PyObject *);
extern PyObject *PyErr_Occurred(void);
extern void PyErr_Clear(void);
extern void PyErr_Fetch(PyObject **, PyObject **, PyObject **);
extern void PyErr_NormalizeException(PyObject **, PyObject **, PyObject **);
extern int PyException_SetTraceback(PyObject *, PyObject *);

typedef uint64_t word;

struct state {  // shim.State
  word *(*execute)(word *), *(*to_host)(word *);  // the entries in Python
  word *list;                                     // the head of the list of what C has destroyed
  PyObject *objects, *references, *shared;        // tables
  PyObject *shutdown, *none, *failed;
  PyObject *begun, *consume, *gone, *over, *wait, *pointer;            // names
  int64_t launch, code, deleted, bytes, index, object, arrays, words;  // of a header (handles.py)
  word ready;                                                          // the handle of every event
  word plain;                                                          // bits of the codes of types that lie as the host has them
} state;

struct launch {  // shim.Launch
  PyObject *execute, *handlers, *zero, *check, *given, *failed;
  int64_t count, donations;
  const int64_t *order;    // of each array that the executable takes, its place among the arguments; -1: `zero`
  const int64_t *donated;  // the places of donated arguments
};

// The first header of an object.
static word *first_of(word *header) { return header - state.words * header[state.index]; }

// The array of a buffer, borrowed; NULL if there is none, as in headers of anything else.
static PyObject *array_of(word *header) {
  PyObject *arrays = (PyObject *)first_of(header)[state.arrays];
  PyObject *array = arrays ? PyList_GetItem(arrays, header[state.index]) : NULL;
  return array == state.none ? NULL : array;
}

// Headers of one object, whose arrays have been dropped, by their numbers; `held` are those that had one.
struct run {
  word *first;
  PyObject *object, *indices, *held;
};

// Tells the object by its method of this name, unless an exception is set, and ends the run.
static void tell(struct run *run, PyObject *method) {
  if (run->first && !PyErr_Occurred()) Py_DecRef(PyObject_CallMethodObjArgs(run->object, method, run->indices, run->held, NULL));
  Py_DecRef(run->object);
  Py_DecRef(run->indices);
  Py_DecRef(run->held);
  *run = (struct run){0};
}

// Drops the array of a header, and adds it to the run; another object's is told first.
static void drop(word *header, struct run *run, PyObject *method) {
  word *first = first_of(header);
  if (first != run->first) {
    tell(run, method);
    *run = (struct run){first, (PyObject *)first[state.object], PyList_New(0), PyList_New(0)};
    Py_IncRef(run->object);
  }
  PyObject *index = PyLong_FromLongLong(header[state.index]), *array = array_of(header);
  int well = run->indices && run->held && index && !PyList_Append(run->indices, index);
  if (well && array && !PyList_Append(run->held, index)) {
    Py_IncRef(state.none);
    PyList_SetItem((PyObject *)first[state.arrays], header[state.index], state.none);
    header[state.deleted] = 1;
  }
  Py_DecRef(index);
}

// Forgets the object of a handle.
static void forget(word *header) {
  PyObject *handle = PyLong_FromUnsignedLongLong((word)header);
  if (handle) PyDict_DelItem(state.objects, handle);
  Py_DecRef(handle);
}

// What `handles.collect` does: forgets the objects that C has destroyed since the last call. Returns whether no exception is set.
static int collect(void) {
  word *header = (word *)__atomic_exchange_n(state.list, 0, __ATOMIC_ACQ_REL);
  struct run run = {0};
  while (header && !PyErr_Occurred()) {
    word *next = (word *)*header;
    drop(header, &run, state.over);
    forget(header);
    header = next;
  }
  tell(&run, state.over);
  return !PyErr_Occurred();
}

// The arrays that the executable takes; NULL if one is deleted.
static PyObject *gathered(const struct launch *launch, word *const *arguments) {
  PyObject *arrays = PyList_New(launch->count);
  for (int64_t i = 0; arrays && i < launch->count; i++) {
    PyObject *array = launch->order[i] < 0 ? launch->zero : array_of(arguments[launch->order[i]]);
    if (!array) {
      Py_DecRef(arrays);
      return NULL;
    }
    Py_IncRef(array);
    PyList_SetItem(arrays, i, array);
  }
  return arrays;
}

// Marks donated arguments as deleted. Returns 0, with nothing marked, if one is given twice, or might be somebody else's too.
static int mark(const struct launch *launch, word *const *arguments) {
  if (launch->donations && (PyDict_Size(state.references) || PyDict_Size(state.shared))) return 0;
  for (int64_t i = 0; i < launch->donations; i++) {
    word *deleted = arguments[launch->donated[i]] + state.deleted;
    if (*deleted) {
      while (i--) arguments[launch->donated[i]][state.deleted] = 0;
      return 0;
    }
    *deleted = 1;
  }
  return 1;
}

// Frees the donated arguments.
static void consume(const struct launch *launch, word *const *arguments) {
  struct run run = {0};
  for (int64_t i = 0; i < launch->donations && !PyErr_Occurred(); i++) drop(arguments[launch->donated[i]], &run, state.gone);
  tell(&run, state.gone);
}

// Whether the memory has room; if not, an exception is set.
static int fits(const struct launch *launch) {
  Py_DecRef(PyObject_CallFunctionObjArgs(launch->check, NULL));
  return !PyErr_Occurred();
}

// The results, in a list; NULL with an exception.
static PyObject *launched(const struct launch *launch, PyObject *arrays) {
  PyObject *running = PyObject_CallFunctionObjArgs(launch->execute, arrays, NULL);
  PyObject *results = running ? PyObject_CallMethodObjArgs(running, state.consume, launch->handlers, NULL) : NULL;
  Py_DecRef(running);
  return results;
}

// Makes buffers of the results, and writes their handles where C wants them, and an event. Returns 0 with an exception.
static int give(const struct launch *launch, PyObject *results, const word *args) {
  PyObject *handle = PyObject_CallFunctionObjArgs(launch->given, results, NULL);
  if (!handle) return 0;
  word *header = (word *)PyLong_AsUnsignedLongLong(handle), **handles = ((word ***)args[7])[0], *events = (word *)args[8];
  for (ptrdiff_t i = 0, count = PyList_Size(results); i < count; i++) handles[i] = header + i * state.words;
  if (events) events[0] = state.ready;
  Py_DecRef(handle);
  return 1;
}

// The handle of the PJRT_Error of the exception that is set.
static word *failure(PyObject *failed) {
  PyObject *handle = NULL;
  while (!handle) {  // Ctrl-C may interrupt this, too
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace) PyException_SetTraceback(error, trace);
    handle = PyObject_CallFunctionObjArgs(failed, error, NULL);
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
  if (!launch || keeps) return state.execute(args);
  int gil = PyGILState_Ensure();
  word *const *arguments = ((word **const *)args[4])[0];
  PyObject *arrays = NULL, *results = NULL;
  word *error = NULL;
  int known = !closing();
  if (known && !(collect() && fits(launch))) {
    error = failure(launch->failed);
  } else if (known && (known = (arrays = gathered(launch, arguments)) && mark(launch, arguments))) {
    results = launched(launch, arrays);
    if (!results) error = failure(launch->failed);
    consume(launch, arguments);
    if (!error && (PyErr_Occurred() || !give(launch, results, args))) error = failure(launch->failed);
  }
  PyErr_Clear();
  Py_DecRef(results);
  Py_DecRef(arrays);
  PyGILState_Release(gil);
  return known ? error : state.execute(args);
}

// Whether a layout's axes are in the order of C, or there is no layout: PJRT_Buffer_MemoryLayout, tiled.
static int is_row_major(const word *layout) {
  if (!layout) return 1;
  const int64_t *order = (const int64_t *)layout[4];
  int64_t rank = layout[5], tiled = (layout[9] & 0xFFFFFFFF) == 0;
  for (int64_t i = 0; tiled && i < rank; i++) tiled = order[i] == rank - 1 - i;
  return tiled;
}

// PJRT_Buffer_ToHostBuffer: words 2 to 6 are the buffer, a layout, where to, the room there and an event. Without a place to copy to, C asks
// for the size.
word *to_host(word *args) {
  word *header = (word *)args[2], size = header[state.bytes];
  if (!args[4]) {
    args[5] = size;
    args[6] = state.ready;
    return NULL;
  }
  int plain = state.plain >> (header[state.code] & 63) & 1;
  if (!plain || args[5] < size || !is_row_major((const word *)args[3])) return state.to_host(args);
  int gil = PyGILState_Ensure();
  PyObject *array = closing() ? NULL : array_of(header);
  Py_IncRef(array);
  PyObject *done = array ? PyObject_CallMethodObjArgs(array, state.wait, NULL) : NULL;
  PyObject *pointer = done && size ? PyObject_CallMethodObjArgs(array, state.pointer, NULL) : NULL;
  if (pointer) memcpy((void *)args[4], (const void *)PyLong_AsUnsignedLongLong(pointer), size);
  word *error = array && PyErr_Occurred() ? failure(state.failed) : NULL;
  int known = array != NULL;
  Py_DecRef(pointer);
  Py_DecRef(done);
  Py_DecRef(array);
  PyGILState_Release(gil);
  if (!known) return state.to_host(args);
  args[6] = state.ready;
  return error;
}
