/* Operations on every message of a compiled graph, in C: slots of a ring, semaphores, waiting, pickling of small values,
 * and sections of code that one thread at a time runs.
 *
 * `raylane.core.native` documents the memory layouts, `_native.pyi` the interface. Every offset is checked against the
 * size of its memory when an object is made, and every size that another process has written is checked before it is
 * used.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000 /* CPython 3.11: one compiled module for this version and all later ones */
#include <Python.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stddef.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the layout of a slot is little-endian"
#endif

enum { SLOT_HEADER_BYTES = 16, FLAGS_AT = 64, FLAGS = 256, SLEEPS_AT = 48, PAGE_BYTES = 4096, WAKE = 4, LOGGED = 32 };
enum { VALUE = 0, NOTHING = 3, BYTES = 5, TEXT = 6 }; /* kinds of messages */
enum { APART = 1 << 16 };         /* size from which a string or bytes are sent as they are */
enum { DESCRIPTOR_BYTES = 1024 }; /* bytes of a slot that are kept free where a message has buffers */

static int64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

static double now_s(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

/* Take writable memory of at least `nbytes`. The exporter stays alive until PyBuffer_Release. */
static int take_memory(PyObject *object, Py_buffer *into, Py_ssize_t nbytes) {
    if (PyObject_GetBuffer(object, into, PyBUF_WRITABLE)) return -1;
    if (into->len >= nbytes) return 0;
    PyErr_Format(PyExc_ValueError, "memory of %zd bytes is too small: %zd are needed", into->len, nbytes);
    PyBuffer_Release(into);
    return -1;
}

/* Return the semaphore at an offset, or NULL with ValueError if it does not lie in the memory. */
static sem_t *semaphore_at(const Py_buffer *memory, Py_ssize_t at) {
    if (at < 0 || at > memory->len - (Py_ssize_t)sizeof(sem_t) || ((uintptr_t)memory->buf + at) % _Alignof(sem_t)) {
        PyErr_Format(PyExc_ValueError, "no semaphore fits at offset %zd of %zd bytes", at, memory->len);
        return NULL;
    }
    return (sem_t *)((char *)memory->buf + at);
}

enum { TYPE_FLAGS = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE };

/* Free the memory of an object, at the end of its dealloc. Each object holds a reference to its type. */
static void release_object(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static int call_without_result(PyObject *function, PyObject *argument) {
    PyObject *callable = Py_NewRef(function); /* the call may replace it in the object that holds it */
    PyObject *done = PyObject_CallFunctionObjArgs(callable, argument, NULL);
    Py_DECREF(callable);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Return NULL from a method of an object whose __init__ has not run, or has failed. */
#define REQUIRE(field) \
    if (!(field)) return PyErr_Format(PyExc_ValueError, "this object was not initialised")

/* Doorbell */

typedef struct {
    PyObject_HEAD
    Py_buffer page;
    sem_t *semaphore;
    unsigned char *flags;
    PyObject *policy;
    int64_t budget_ns, resume_ns, slow_ns;
    long long consumed, read;
    int logged;
    int64_t lengths_ns[LOGGED], worst_ns[LOGGED];
} Doorbell;

static int doorbell_init(Doorbell *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"page", "policy", NULL};
    PyObject *page, *policy;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO", names, &page, &policy)) return -1;
    if (self->page.obj) {
        PyErr_SetString(PyExc_TypeError, "a Doorbell is initialised once");
        return -1;
    }
    PyObject *slow = PyObject_GetAttrString(policy, "slow_ns"), *budget = PyObject_GetAttrString(policy, "budget_ns");
    int64_t slow_ns = slow ? PyLong_AsLongLong(slow) : -1, budget_ns = budget ? PyLong_AsLongLong(budget) : -1;
    Py_XDECREF(slow);
    Py_XDECREF(budget);
    if (PyErr_Occurred() || take_memory(page, &self->page, PAGE_BYTES)) return -1;
    self->semaphore = semaphore_at(&self->page, 0);
    if (!self->semaphore) return -1;
    self->flags = (unsigned char *)self->page.buf + FLAGS_AT;
    self->policy = Py_NewRef(policy);
    self->slow_ns = slow_ns;
    self->budget_ns = budget_ns;
    return 0;
}

static void doorbell_dealloc(Doorbell *self) {
    if (self->page.obj) PyBuffer_Release(&self->page);
    Py_XDECREF(self->policy);
    release_object((PyObject *)self);
}

/* Return the waits that were noted, as a list of (length, longest yield). */
static PyObject *noted(Doorbell *self, int logged) {
    PyObject *waits = PyList_New(logged);
    for (int i = 0; waits && i < logged; i++) {
        PyObject *pair = Py_BuildValue("(LL)", (long long)self->lengths_ns[i], (long long)self->worst_ns[i]);
        if (pair)
            PyList_SetItem(waits, i, pair);
        else
            Py_CLEAR(waits);
    }
    return waits;
}

/* Let the policy look at the waits that were noted since its last look. */
static int review(Doorbell *self, int64_t now) {
    int logged = self->logged;
    self->logged = 0; /* before anything can fail: the next wait is noted at the start of the arrays */
    PyObject *waits = noted(self, logged);
    PyObject *found = waits ? PyObject_CallMethod(self->policy, "review", "OL", waits, (long long)now) : NULL;
    Py_XDECREF(waits);
    long long budget = self->budget_ns, resume = self->resume_ns;
    int ok = found && PyArg_ParseTuple(found, "LL", &budget, &resume);
    Py_XDECREF(found);
    self->budget_ns = budget;
    self->resume_ns = resume;
    if (ok) return 0;
    /* Without memory the policy misses these waits. The wait itself has succeeded, and its post is consumed. */
    if (!PyErr_ExceptionMatches(PyExc_MemoryError)) return -1;
    PyErr_Clear();
    return 0;
}

static int note(Doorbell *self, int64_t length, int64_t worst, int64_t now) {
    self->lengths_ns[self->logged] = length;
    self->worst_ns[self->logged] = worst;
    self->logged++;
    return self->logged == LOGGED || worst > self->slow_ns ? review(self, now) : 0;
}

/* In the C library since 2.30; NULL in an older one. */
extern int sem_clockwait(sem_t *, clockid_t, const struct timespec *) __attribute__((weak));

static int sleep_for(sem_t *semaphore, double timeout_s) {
    double whole = timeout_s < 1.0 ? timeout_s : 1.0;
    struct timespec until;
    clock_gettime(sem_clockwait ? CLOCK_MONOTONIC : CLOCK_REALTIME, &until);
    int64_t nanoseconds = until.tv_nsec + (int64_t)((whole > 0 ? whole : 0) * 1e9);
    until.tv_sec += (time_t)(nanoseconds / 1000000000);
    until.tv_nsec = (long)(nanoseconds % 1000000000);
    return sem_clockwait ? sem_clockwait(semaphore, CLOCK_MONOTONIC, &until) : sem_timedwait(semaphore, &until);
}

/* Yield until the semaphore was taken, the budget is spent, or a yield took too long. Returns 1 if it was taken. */
static int yield_for(Doorbell *self, int64_t start, int64_t *worst, int64_t *end) {
    int64_t last = start, budget = self->budget_ns, slow = self->slow_ns;
    for (;;) {
        sched_yield();
        int got = !sem_trywait(self->semaphore);
        int64_t now = now_ns();
        if (now - last > *worst) *worst = now - last;
        *end = now;
        if (got) return 1;
        if (now - last > slow || now - start >= budget) return 0;
        last = now;
    }
}

static PyObject *doorbell_wait(Doorbell *self, PyObject *timeout) {
    REQUIRE(self->policy);
    if (!sem_trywait(self->semaphore)) {
        self->consumed++;
        Py_RETURN_TRUE;
    }
    double timeout_s = PyFloat_AsDouble(timeout);
    if (timeout_s == -1.0 && PyErr_Occurred()) return NULL;
    int64_t start = now_ns(), worst = 0, end = start;
    int got = 0;
    Py_BEGIN_ALLOW_THREADS
    if (self->budget_ns > 0 && start >= self->resume_ns) got = yield_for(self, start, &worst, &end);
    if (!got) {
        got = !sleep_for(self->semaphore, timeout_s);
        end = now_ns();
    }
    Py_END_ALLOW_THREADS
    if (got) self->consumed++;
    if (note(self, end - start, worst, end)) return NULL;
    return PyBool_FromLong(got);
}

static PyObject *doorbell_glance(Doorbell *self, PyObject *Py_UNUSED(ignored)) {
    REQUIRE(self->policy);
    if (!sem_trywait(self->semaphore)) {
        self->consumed++;
        Py_RETURN_TRUE;
    }
    int64_t start = now_ns(), worst = 0, end = start;
    int got = 0;
    if (self->budget_ns <= 0 || start < self->resume_ns) Py_RETURN_FALSE;
    Py_BEGIN_ALLOW_THREADS
    got = yield_for(self, start, &worst, &end);
    Py_END_ALLOW_THREADS
    if (got) self->consumed++;
    if (note(self, end - start, worst, end)) return NULL;
    return PyBool_FromLong(got);
}

static PyObject *doorbell_absorb(Doorbell *self, PyObject *Py_UNUSED(ignored)) {
    REQUIRE(self->policy);
    int found = 0;
    while (self->consumed < self->read && !sem_trywait(self->semaphore)) {
        self->consumed++;
        found = 1;
    }
    return PyBool_FromLong(found);
}

static PyObject *doorbell_flagged(Doorbell *self, PyObject *Py_UNUSED(ignored)) {
    REQUIRE(self->policy);
    unsigned char *found = memchr(self->flags, 1, FLAGS);
    if (!found) return PyLong_FromLong(-1);
    __atomic_store_n(found, 0, __ATOMIC_SEQ_CST);
    return PyLong_FromLong(found - self->flags);
}

static PyObject *doorbell_sleeping(Doorbell *self, PyObject *value) {
    REQUIRE(self->policy);
    int sleeps = PyObject_IsTrue(value);
    if (sleeps < 0) return NULL;
    /* Ordered against the reads that follow: a writer either sees the mark, or its message is seen. */
    __atomic_store_n((unsigned char *)self->page.buf + SLEEPS_AT, (unsigned char)sleeps, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

static PyMethodDef doorbell_methods[] = {
    {"wait", (PyCFunction)doorbell_wait, METH_O, "Wait for one post and consume it; False after the timeout."},
    {"glance", (PyCFunction)doorbell_glance, METH_NOARGS, "Wait like `wait`, but never sleep."},
    {"absorb", (PyCFunction)doorbell_absorb, METH_NOARGS, "Consume posts of messages that were read before them."},
    {"flagged", (PyCFunction)doorbell_flagged, METH_NOARGS, "Clear and return one flag that is set, or -1."},
    {"sleeping", (PyCFunction)doorbell_sleeping, METH_O, "Mark that the event loop sleeps, or that it does not."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef doorbell_members[] = {
    {"consumed", T_LONGLONG, offsetof(Doorbell, consumed), 0, "Posts consumed."},
    {"read", T_LONGLONG, offsetof(Doorbell, read), 0, "Messages read."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot doorbell_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, doorbell_init},
    {Py_tp_dealloc, doorbell_dealloc},
    {Py_tp_methods, doorbell_methods},
    {Py_tp_members, doorbell_members},
    {0, NULL},
};

static PyType_Spec doorbell_spec = {"raylane.core._native.Doorbell", sizeof(Doorbell), 0,
                                    TYPE_FLAGS | Py_TPFLAGS_BASETYPE, doorbell_slots};

/* Slots */

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Py_ssize_t slots_at, slots, slot_bytes;
    sem_t *full;
    Doorbell *doorbell;
    PyObject *loads;
    long long sequence, read_bytes;
} SlotReader;

static int check_slots(Py_buffer *memory, Py_ssize_t at, Py_ssize_t slots, Py_ssize_t slot_bytes) {
    if (at >= 0 && slots > 0 && slot_bytes >= SLOT_HEADER_BYTES && at <= memory->len &&
        slots <= (memory->len - at) / slot_bytes)
        return 0;
    PyErr_Format(PyExc_ValueError, "%zd slots of %zd bytes at offset %zd do not fit into %zd bytes", slots, slot_bytes,
                 at, memory->len);
    return -1;
}

typedef struct {
    PyTypeObject *doorbell, *result, *recorder;
    PyObject *busy, *damaged_ring;
} ModuleState;

/* Return the state of this module for one of its types, or for a subclass. */
static ModuleState *state_of(PyTypeObject *type) {
    ModuleState *state;
    while (!(state = PyType_GetModuleState(type))) {
        PyErr_Clear();
        type = (PyTypeObject *)PyType_GetSlot(type, Py_tp_base);
    }
    return state;
}

static int reader_init(SlotReader *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"memory", "full_at", "slots_at", "slots", "slot_bytes", "doorbell", "loads", NULL};
    PyObject *memory, *loads;
    Doorbell *doorbell;
    Py_ssize_t full_at;
    if (self->memory.obj) {
        PyErr_SetString(PyExc_TypeError, "a SlotReader is initialised once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OnnnnO!O", names, &memory, &full_at, &self->slots_at,
                                     &self->slots, &self->slot_bytes, state_of(Py_TYPE((PyObject *)self))->doorbell,
                                     &doorbell, &loads))
        return -1;
    if (take_memory(memory, &self->memory, 0)) return -1;
    if (check_slots(&self->memory, self->slots_at, self->slots, self->slot_bytes)) return -1;
    self->full = semaphore_at(&self->memory, full_at);
    if (!self->full) return -1;
    self->doorbell = (Doorbell *)Py_NewRef((PyObject *)doorbell);
    self->loads = Py_NewRef(loads);
    return 0;
}

static void reader_dealloc(SlotReader *self) {
    if (self->memory.obj) PyBuffer_Release(&self->memory);
    Py_XDECREF((PyObject *)self->doorbell);
    Py_XDECREF(self->loads);
    release_object((PyObject *)self);
}

typedef struct {
    const char *body;
    uint32_t size;
    uint16_t buffers;
    unsigned char kind, flags;
} Slot;

/* Take the next message, after a successful wait for it. Returns -1 with an error if the ring was overrun. */
static int take_slot(SlotReader *self, Slot *slot) {
    const char *at =
        (char *)self->memory.buf + self->slots_at + (Py_ssize_t)(self->sequence % self->slots) * self->slot_bytes;
    uint64_t sequence;
    memcpy(&sequence, at, 8);
    memcpy(&slot->size, at + 8, 4);
    memcpy(&slot->buffers, at + 14, 2);
    slot->kind = (unsigned char)at[12];
    slot->flags = (unsigned char)at[13];
    slot->body = at + SLOT_HEADER_BYTES;
    if (sequence != (uint64_t)self->sequence) {
        PyErr_Format(state_of(Py_TYPE((PyObject *)self))->damaged_ring,
                     "message %llu in the place of message %lld: a ring was overrun",
                     (unsigned long long)sequence, self->sequence);
        return -1;
    }
    /* Before anything can fail: the message is consumed in any case. */
    self->sequence++;
    self->doorbell->read++;
    if (slot->buffers || slot->size <= self->slot_bytes - SLOT_HEADER_BYTES) return 0;
    PyErr_Format(state_of(Py_TYPE((PyObject *)self))->damaged_ring, "a message of %u bytes does not fit into a slot",
                 slot->size);
    return -1;
}

/* Return (kind, flags, body) of a message that was taken. The body is None if there are buffers: see `parts`. */
static PyObject *description(const Slot *slot) {
    PyObject *body = slot->buffers ? Py_NewRef(Py_None) : PyBytes_FromStringAndSize(slot->body, slot->size);
    PyObject *found = body ? PyTuple_New(3) : NULL;
    if (!found) {
        Py_XDECREF(body);
        return NULL;
    }
    PyTuple_SetItem(found, 0, PyLong_FromLong(slot->kind)); /* a small int: cannot fail */
    PyTuple_SetItem(found, 1, PyLong_FromLong(slot->flags));
    PyTuple_SetItem(found, 2, body);
    return found;
}

static PyObject *reader_take(SlotReader *self, PyObject *Py_UNUSED(ignored)) {
    REQUIRE(self->doorbell);
    Slot slot;
    return take_slot(self, &slot) ? NULL : description(&slot);
}

static PyObject *reader_poll(SlotReader *self, PyObject *ignored) {
    REQUIRE(self->doorbell);
    if (sem_trywait(self->full)) Py_RETURN_NONE;
    return reader_take(self, ignored);
}

/* Return the value of a message without buffers, NULL with an error if it cannot be unpickled. */
static PyObject *value_of(SlotReader *self, const Slot *slot) {
    if (slot->kind == TEXT) return PyUnicode_DecodeUTF8(slot->body, slot->size, "surrogatepass"); /* as pickle does */
    PyObject *body = PyBytes_FromStringAndSize(slot->body, slot->size);
    if (!body || slot->kind == BYTES) return body;
    PyObject *value = PyObject_CallFunctionObjArgs(self->loads, body, NULL);
    Py_DECREF(body);
    return value;
}

static PyObject *reader_read(SlotReader *self, PyObject *const *args, Py_ssize_t count) {
    REQUIRE(self->doorbell);
    if (count != 3) return PyErr_Format(PyExc_TypeError, "read takes a list, an index and a function or None");
    if (args[0] != Py_None && !PyList_Check(args[0])) return PyErr_Format(PyExc_TypeError, "values are a list");
    Py_ssize_t index = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (sem_trywait(self->full)) Py_RETURN_NONE;
    Slot slot;
    if (take_slot(self, &slot)) return NULL;
    if (slot.buffers || (slot.kind != VALUE && slot.kind != BYTES && slot.kind != TEXT && slot.kind != NOTHING))
        return description(&slot);
    self->read_bytes += slot.size;
    if (args[0] != Py_None && slot.kind != NOTHING) {
        if (args[2] != Py_None && call_without_result(args[2], NULL)) return NULL;
        PyObject *value = value_of(self, &slot);
        if (!value || PyList_SetItem(args[0], index, value)) return NULL;
    }
    return PyLong_FromLong(slot.flags);
}

static PyObject *reader_parts(SlotReader *self, PyObject *Py_UNUSED(ignored)) {
    REQUIRE(self->doorbell);
    if (!self->sequence) return PyErr_Format(PyExc_ValueError, "no message was taken");
    const char *slot =
        (char *)self->memory.buf + self->slots_at + (Py_ssize_t)((self->sequence - 1) % self->slots) * self->slot_bytes;
    uint32_t body_size;
    uint16_t count;
    memcpy(&body_size, slot + 8, 4);
    memcpy(&count, slot + 14, 2);
    Py_ssize_t room = self->slot_bytes - SLOT_HEADER_BYTES - 8 * (Py_ssize_t)count;
    if (room < 0) return PyErr_Format(PyExc_AssertionError, "%d buffers do not fit into a slot", (int)count);
    const char *sizes = slot + SLOT_HEADER_BYTES, *at = sizes + 8 * (Py_ssize_t)count;
    PyObject *parts = PyList_New(count), *body = NULL, *found = NULL;
    for (Py_ssize_t i = 0; parts && i < count; i++) {
        uint64_t size;
        memcpy(&size, sizes + 8 * i, 8);
        if (size > (uint64_t)room) {
            PyErr_Format(PyExc_AssertionError, "a buffer of %llu bytes does not fit into a slot", (unsigned long long)size);
            Py_CLEAR(parts);
            break;
        }
        PyObject *part = PyByteArray_FromStringAndSize(at, (Py_ssize_t)size); /* arrays in it are writable */
        if (!part) {
            Py_CLEAR(parts);
            break;
        }
        PyList_SetItem(parts, i, part);
        at += size;
        room -= (Py_ssize_t)size;
    }
    if (parts && (Py_ssize_t)body_size > room)
        PyErr_Format(PyExc_AssertionError, "a message of %u bytes does not fit into a slot", body_size);
    else if (parts)
        body = PyBytes_FromStringAndSize(at, body_size);
    if (body) found = PyTuple_Pack(2, body, parts);
    Py_XDECREF(body);
    Py_XDECREF(parts);
    return found;
}

static PyMethodDef reader_methods[] = {
    {"parts", (PyCFunction)reader_parts, METH_NOARGS, "Return (body, buffers) of the message that was taken last."},
    {"take", (PyCFunction)reader_take, METH_NOARGS, "Read the next message, after a successful wait for it."},
    {"poll", (PyCFunction)reader_poll, METH_NOARGS, "Read the next message, or return None if there is none."},
    {"read", (PyCFunction)(void (*)(void))reader_read, METH_FASTCALL,
     "Read the next message, and store its value if it is a usual one."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef reader_members[] = {
    {"sequence", T_LONGLONG, offsetof(SlotReader, sequence), 0, "Number of the next message."},
    {"read_bytes", T_LONGLONG, offsetof(SlotReader, read_bytes), 0, "Bytes of the messages that `read` has taken over."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slot_reader_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, reader_init},
    {Py_tp_dealloc, reader_dealloc},
    {Py_tp_methods, reader_methods},
    {Py_tp_members, reader_members},
    {0, NULL},
};

static PyType_Spec slot_reader_spec = {"raylane.core._native.SlotReader", sizeof(SlotReader), 0,
                                       TYPE_FLAGS | Py_TPFLAGS_BASETYPE, slot_reader_slots};

typedef struct {
    Py_buffer page;
    sem_t *semaphore;
    unsigned char *flag;
} Bell;

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Py_ssize_t slots_at, slots, slot_bytes, most_copied, readers;
    sem_t **fulls;
    Bell *bells;
    int wake_fd, ready;
    long long bytes;
} SlotWriter;

static int writer_init(SlotWriter *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"memory", "slots_at", "slots", "slot_bytes", "most_copied", "readers", NULL};
    PyObject *memory, *readers;
    if (self->memory.obj) {
        PyErr_SetString(PyExc_TypeError, "a SlotWriter is initialised once");
        return -1;
    }
    self->wake_fd = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OnnnnO!", names, &memory, &self->slots_at, &self->slots,
                                     &self->slot_bytes, &self->most_copied, &PyTuple_Type, &readers))
        return -1;
    if (take_memory(memory, &self->memory, 0)) return -1;
    if (check_slots(&self->memory, self->slots_at, self->slots, self->slot_bytes)) return -1;
    Py_ssize_t count = PyTuple_Size(readers);
    self->fulls = PyMem_Calloc((size_t)count + 1, sizeof(sem_t *));
    self->bells = PyMem_Calloc((size_t)count + 1, sizeof(Bell));
    if (!self->fulls || !self->bells) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t full_at;
        PyObject *page;
        int flag;
        PyObject *reader = PyTuple_GetItem(readers, i);
        if (!PyTuple_Check(reader)) {
            PyErr_SetString(PyExc_TypeError, "each reader is (offset of its semaphore, page, flag)");
            return -1;
        }
        if (!PyArg_ParseTuple(reader, "nOi", &full_at, &page, &flag)) return -1;
        if (flag < 0 || flag >= FLAGS) {
            PyErr_Format(PyExc_ValueError, "flag %d is not below %d", flag, FLAGS);
            return -1;
        }
        self->fulls[i] = semaphore_at(&self->memory, full_at);
        if (!self->fulls[i] || take_memory(page, &self->bells[i].page, PAGE_BYTES)) return -1;
        self->readers = i + 1; /* from here on dealloc releases this page */
        self->bells[i].semaphore = semaphore_at(&self->bells[i].page, 0);
        if (!self->bells[i].semaphore) return -1;
        self->bells[i].flag = (unsigned char *)self->bells[i].page.buf + FLAGS_AT + flag;
    }
    self->ready = 1;
    return 0;
}

static void writer_dealloc(SlotWriter *self) {
    for (Py_ssize_t i = 0; i < self->readers; i++) PyBuffer_Release(&self->bells[i].page);
    PyMem_Free(self->fulls);
    PyMem_Free(self->bells);
    if (self->memory.obj) PyBuffer_Release(&self->memory);
    release_object((PyObject *)self);
}

/* Notify a reader from now on through the doorbell on another page: the reader's process was replaced. */
static PyObject *writer_replace_page(SlotWriter *self, PyObject *args) {
    Py_ssize_t index;
    PyObject *page;
    Py_buffer memory;
    REQUIRE(self->ready);
    if (!PyArg_ParseTuple(args, "nO", &index, &page)) return NULL;
    if (index < 0 || index >= self->readers) return PyErr_Format(PyExc_IndexError, "there is no reader %zd", index);
    if (take_memory(page, &memory, PAGE_BYTES)) return NULL;
    Bell *bell = &self->bells[index];
    sem_t *semaphore = semaphore_at(&memory, 0);
    if (!semaphore) {
        PyBuffer_Release(&memory);
        return NULL;
    }
    Py_buffer old = bell->page;
    bell->flag = (unsigned char *)memory.buf + (bell->flag - (unsigned char *)old.buf);
    bell->semaphore = semaphore;
    bell->page = memory;
    PyBuffer_Release(&old);
    Py_RETURN_NONE;
}

static void notify_readers(SlotWriter *self, int flags) {
    /* All `full` semaphores before the first doorbell: a reader that wakes must find its message. */
    for (Py_ssize_t i = 0; i < self->readers; i++) sem_post(self->fulls[i]);
    int sleeps = 0;
    for (Py_ssize_t i = 0; i < self->readers; i++) {
        __atomic_store_n(self->bells[i].flag, 1, __ATOMIC_RELEASE);
        sem_post(self->bells[i].semaphore);
    }
    if (!(flags & WAKE) || self->wake_fd < 0) return;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (Py_ssize_t i = 0; i < self->readers; i++)
        sleeps |= __atomic_load_n((unsigned char *)self->bells[i].page.buf + SLEEPS_AT, __ATOMIC_SEQ_CST);
    if (sleeps) eventfd_write(self->wake_fd, 1); /* fails only if 2^64 writes are unread, and then the loop is awake */
}

/* Take sequence, kind and flags of a message, and return its slot; NULL with an error if one is out of range. */
static char *slot_for(SlotWriter *self, PyObject *const args[3], long long *sequence, long *kind, long *flags) {
    *sequence = PyLong_AsLongLong(args[0]);
    *kind = PyLong_AsLong(args[1]);
    *flags = PyLong_AsLong(args[2]);
    if (PyErr_Occurred()) return NULL;
    if (*sequence < 0 || *kind < 0 || *kind > 255 || *flags < 0 || *flags > 255) {
        PyErr_Format(PyExc_ValueError, "sequence %lld, kind %ld or flags %ld out of range", *sequence, *kind, *flags);
        return NULL;
    }
    return (char *)self->memory.buf + self->slots_at + (Py_ssize_t)(*sequence % self->slots) * self->slot_bytes;
}

static void fill_header(char *slot, long long sequence, uint32_t size, long kind, long flags, uint16_t count) {
    memcpy(slot, &sequence, 8);
    memcpy(slot + 8, &size, 4);
    slot[12] = (char)kind;
    slot[13] = (char)flags;
    memcpy(slot + 14, &count, 2);
}

static PyObject *writer_write_parts(SlotWriter *self, PyObject *const *args, Py_ssize_t count) {
    REQUIRE(self->ready);
    if (count != 5 || !PyList_Check(args[4]))
        return PyErr_Format(PyExc_TypeError, "write_parts takes sequence, kind, flags, body and a list of buffers");
    long long sequence;
    long kind, flags;
    char *slot = slot_for(self, args, &sequence, &kind, &flags);
    if (!slot) return NULL;
    Py_ssize_t parts = PyList_Size(args[4]), room = (self->slot_bytes - SLOT_HEADER_BYTES) / 8, total = 0;
    if (parts > UINT16_MAX || parts > room)
        return PyErr_Format(PyExc_ValueError, "%zd buffers do not fit into a slot of %zd bytes", parts, self->slot_bytes);
    room = self->slot_bytes - SLOT_HEADER_BYTES - 8 * parts;
    char *sizes = slot + SLOT_HEADER_BYTES, *at = sizes + 8 * parts;
    uint32_t body_size = 0;
    /* The body comes last. Taking a buffer may run code that changes the list, so each is taken by its number. */
    for (Py_ssize_t i = 0; i <= parts; i++) {
        if (i < parts && i >= PyList_Size(args[4]))
            return PyErr_Format(PyExc_ValueError, "the list of buffers became shorter");
        PyObject *part = Py_NewRef(i < parts ? PyList_GetItem(args[4], i) : args[3]);
        Py_buffer from;
        int failed = PyObject_GetBuffer(part, &from, PyBUF_SIMPLE);
        Py_DECREF(part);
        if (failed) return NULL;
        if (from.len > room) {
            PyErr_Format(PyExc_ValueError, "%zd bytes do not fit into a slot of %zd", total + from.len, self->slot_bytes);
            PyBuffer_Release(&from);
            return NULL;
        }
        memcpy(at, from.buf, (size_t)from.len);
        at += from.len;
        room -= from.len;
        total += from.len;
        uint64_t size = (uint64_t)from.len;
        if (i < parts)
            memcpy(sizes + 8 * i, &size, 8);
        else
            body_size = (uint32_t)size;
        PyBuffer_Release(&from);
    }
    fill_header(slot, sequence, body_size, kind, flags, (uint16_t)parts);
    self->bytes += total;
    notify_readers(self, (int)flags);
    Py_RETURN_NONE;
}

/* Return 1 if the buffers of a message may be copied into a slot beside a body, 0 if not, -1 with an error. */
static int parts_fit(SlotWriter *self, Py_ssize_t body_bytes, PyObject *buffers) {
    Py_ssize_t count = PyList_Size(buffers), total = 0;
    Py_ssize_t room = self->slot_bytes - SLOT_HEADER_BYTES - DESCRIPTOR_BYTES - 8 * count - body_bytes;
    for (Py_ssize_t i = 0; i < count && i < PyList_Size(buffers); i++) {
        PyObject *part = Py_NewRef(PyList_GetItem(buffers, i));
        Py_buffer from;
        int failed = PyObject_GetBuffer(part, &from, PyBUF_SIMPLE);
        Py_DECREF(part);
        if (failed) return -1;
        total += from.len;
        PyBuffer_Release(&from);
    }
    return total <= self->most_copied && total <= room;
}

static PyObject *writer_write(SlotWriter *self, PyObject *const *args, Py_ssize_t count) {
    REQUIRE(self->ready);
    if (count == 2) { /* without flags */
        PyObject *zero = PyLong_FromLong(0), *all[] = {args[0], args[1], zero};
        PyObject *done = zero ? writer_write(self, all, 3) : NULL;
        Py_XDECREF(zero);
        return done;
    }
    if (count != 3 || !PyTuple_Check(args[1]) || PyTuple_Size(args[1]) < 3)
        return PyErr_Format(PyExc_TypeError, "write takes sequence, message and flags");
    PyObject *message = args[1], *buffers = PyTuple_GetItem(message, 2);
    PyObject *parts[5] = {args[0], PyTuple_GetItem(message, 0), args[2], PyTuple_GetItem(message, 1), buffers};
    Py_buffer body;
    if (PyObject_GetBuffer(parts[3], &body, PyBUF_SIMPLE)) return NULL;
    int fits = body.len <= self->slot_bytes - SLOT_HEADER_BYTES;
    if (PyList_Check(buffers) && PyList_Size(buffers)) {
        fits = parts_fit(self, body.len, buffers);
        PyBuffer_Release(&body);
        if (fits < 0) return NULL;
        if (fits) return writer_write_parts(self, parts, 5);
    } else if (fits) {
        long long sequence;
        long kind, flags;
        char *slot = slot_for(self, parts, &sequence, &kind, &flags);
        if (slot) {
            fill_header(slot, sequence, (uint32_t)body.len, kind, flags, 0);
            memcpy(slot + SLOT_HEADER_BYTES, body.buf, (size_t)body.len);
            self->bytes += body.len;
        }
        PyBuffer_Release(&body);
        if (!slot) return NULL;
        notify_readers(self, (int)flags);
        Py_RETURN_NONE;
    } else {
        PyBuffer_Release(&body);
    }
    return PyObject_CallMethod((PyObject *)self, "write_elsewhere", "(OOO)", args[0], message, args[2]);
}

static PyObject *writer_write_elsewhere(SlotWriter *self, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(count)) {
    return PyErr_Format(PyExc_ValueError, "a message does not fit into a slot of %zd bytes", self->slot_bytes);
}

static PyMethodDef writer_methods[] = {
    {"write", (PyCFunction)(void (*)(void))writer_write, METH_FASTCALL, "Write one message; notify the readers."},
    {"replace_page", (PyCFunction)writer_replace_page, METH_VARARGS, "Notify a reader on another doorbell page."},
    {"write_elsewhere", (PyCFunction)(void (*)(void))writer_write_elsewhere, METH_FASTCALL,
     "Write one message that is too large for its slot; a subclass does so."},
    {"write_parts", (PyCFunction)(void (*)(void))writer_write_parts, METH_FASTCALL,
     "Write one message with buffers that fit into the slot; notify the readers."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef writer_members[] = {
    {"wake_fd", T_INT, offsetof(SlotWriter, wake_fd), 0, "Eventfd of the reader's event loop, or -1."},
    {"bytes", T_LONGLONG, offsetof(SlotWriter, bytes), 0, "Bytes written."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slot_writer_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, writer_init},
    {Py_tp_dealloc, writer_dealloc},
    {Py_tp_methods, writer_methods},
    {Py_tp_members, writer_members},
    {0, NULL},
};

static PyType_Spec slot_writer_spec = {"raylane.core._native.SlotWriter", sizeof(SlotWriter), 0,
                                       TYPE_FLAGS | Py_TPFLAGS_BASETYPE, slot_writer_slots};

/* Encoder of values into messages */

typedef struct {
    PyObject_HEAD
    PyTypeObject *message;
    allocfunc new_message;
    PyObject *modules, *none, *no_buffers;
    Py_ssize_t most_kept;
    PyObject *dump, *forget, *output, *buffers, *awaited; /* replaced by each `prepare` */
} Encoder;

static int encoder_init(Encoder *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"message", "none", "modules", "most_kept", NULL};
    PyObject *message, *none, *modules;
    Py_ssize_t most_kept;
    if (self->message) {
        PyErr_SetString(PyExc_TypeError, "an Encoder is initialised once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO!n", names, &PyType_Type, &message, &none, &PyDict_Type,
                                     &modules, &most_kept))
        return -1;
    if (!PyType_IsSubtype((PyTypeObject *)message, &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "messages are tuples");
        return -1;
    }
    self->no_buffers = PyTuple_New(0);
    if (!self->no_buffers) return -1;
    self->new_message = (allocfunc)PyType_GetSlot((PyTypeObject *)message, Py_tp_alloc);
    self->message = (PyTypeObject *)Py_NewRef(message);
    self->none = Py_NewRef(none);
    self->modules = Py_NewRef(modules);
    self->most_kept = most_kept;
    return 0;
}

static int encoder_clear(Encoder *self) {
    PyObject **fields[] = {(PyObject **)&self->message, &self->modules, &self->none,    &self->no_buffers, &self->dump,
                           &self->forget,               &self->output,  &self->buffers, &self->awaited};
    for (size_t i = 0; i < sizeof(fields) / sizeof(*fields); i++) Py_CLEAR(*fields[i]);
    return 0;
}

static int encoder_traverse(Encoder *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->message);
    Py_VISIT(self->modules);
    Py_VISIT(self->none);
    Py_VISIT(self->no_buffers);
    Py_VISIT(self->dump);
    Py_VISIT(self->forget);
    Py_VISIT(self->output);
    Py_VISIT(self->buffers);
    Py_VISIT(self->awaited);
    return 0;
}

static void encoder_dealloc(Encoder *self) {
    PyObject_GC_UnTrack((PyObject *)self);
    encoder_clear(self);
    release_object((PyObject *)self);
}

static PyObject *encoder_prepare(Encoder *self, PyObject *args) {
    PyObject *dump, *forget, *output, *buffers, *awaited;
    REQUIRE(self->message);
    if (!PyArg_ParseTuple(args, "OOO!O!O!", &dump, &forget, &PyList_Type, &output, &PyList_Type, &buffers,
                          &PyTuple_Type, &awaited))
        return NULL;
    PyObject *old[] = {self->dump, self->forget, self->output, self->buffers, self->awaited};
    self->dump = Py_NewRef(dump);
    self->forget = Py_NewRef(forget);
    self->output = Py_NewRef(output);
    self->buffers = Py_NewRef(buffers);
    self->awaited = Py_NewRef(awaited);
    for (size_t i = 0; i < sizeof(old) / sizeof(*old); i++) Py_XDECREF(old[i]);
    Py_RETURN_NONE;
}

/* Return a message without buffers. Takes over the reference to `body`, which may be NULL after an error. */
static PyObject *message_of(Encoder *self, long kind, PyObject *body, PyObject *held) {
    PyObject *message = body ? self->new_message(self->message, 4) : NULL;
    if (!message) {
        Py_XDECREF(body);
        return NULL;
    }
    PyTuple_SetItem(message, 0, PyLong_FromLong(kind)); /* a small int: cannot fail */
    PyTuple_SetItem(message, 1, body);
    PyTuple_SetItem(message, 2, Py_NewRef(self->no_buffers));
    PyTuple_SetItem(message, 3, Py_NewRef(held));
    return message;
}

/* Return the message of large bytes or of a large string in ASCII, which need no pickle; NULL without error for others. */
static PyObject *message_as_it_is(Encoder *self, PyObject *value) {
    if (PyBytes_CheckExact(value))
        return PyBytes_Size(value) < APART ? NULL : message_of(self, BYTES, Py_NewRef(value), value);
    if (!PyUnicode_CheckExact(value) || PyUnicode_GetLength(value) < APART) return NULL;
    PyObject *is_ascii = PyObject_CallMethod(value, "isascii", NULL);
    Py_XDECREF(is_ascii);
    if (is_ascii != Py_True) return NULL;
    /* The characters are its bytes in UTF-8: no copy is made. */
    Py_ssize_t nbytes;
    const char *text = PyUnicode_AsUTF8AndSize(value, &nbytes);
    return text ? message_of(self, TEXT, PyMemoryView_FromMemory((char *)text, nbytes, PyBUF_READ), value) : NULL;
}

/* Return 1 if a pickle has the string `__main__`: opcode SHORT_BINUNICODE, length 8. The opcode occurs in no ASCII text,
 * so memchr goes through text at the speed of memory. */
static int names_script(const char *body, size_t size) {
    static const char name[] = "\x8c\x08__main__";
    const size_t length = sizeof(name) - 1;
    const char *end = body + size, *at = body;
    while ((size_t)(end - at) >= length && (at = memchr(at, name[0], (size_t)(end - at) - length + 1))) {
        if (!memcmp(at, name, length)) return 1;
        at++;
    }
    return 0;
}

static PyObject *encoder_small(Encoder *self, PyObject *value) {
    REQUIRE(self->dump);
    if (value == Py_None) return Py_NewRef(self->none);
    PyObject *message = message_as_it_is(self, value);
    if (message || PyErr_Occurred()) return message;
    for (Py_ssize_t i = 0; i < PyTuple_Size(self->awaited); i++) {
        int imported = PyDict_Contains(self->modules, PyTuple_GetItem(self->awaited, i));
        if (imported < 0) return NULL;
        if (!imported) continue;
        PyObject *done = PyObject_CallMethod((PyObject *)self, "renew", NULL);
        Py_XDECREF(done);
        if (!done) return NULL;
        break;
    }
    if (call_without_result(self->dump, value) || call_without_result(self->forget, NULL)) return NULL;
    if (PyList_Size(self->output) != 1 || PyList_Size(self->buffers)) Py_RETURN_NONE;
    PyObject *body = PyList_GetItem(self->output, 0);
    if (!PyBytes_Check(body) || PyBytes_Size(body) >= self->most_kept) Py_RETURN_NONE;
    if (names_script(PyBytes_AsString(body), (size_t)PyBytes_Size(body))) Py_RETURN_NONE;
    Py_INCREF(body);
    if (PyList_SetSlice(self->output, 0, 1, NULL)) Py_CLEAR(body);
    return message_of(self, VALUE, body, Py_None);
}

static PyObject *encoder_encode(Encoder *self, PyObject *value) {
    PyObject *message = encoder_small(self, value);
    if (message == Py_None) {
        Py_DECREF(message);
        message = PyObject_CallMethod((PyObject *)self, "rest", "(O)", value);
    }
    if (message) return message;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback) PyException_SetTraceback(error, traceback);
    message = PyObject_CallMethod((PyObject *)self, "unusual", "(OO)", value, error);
    Py_DECREF(type);
    Py_DECREF(error);
    Py_XDECREF(traceback);
    return message;
}

static PyObject *encoder_left_to_subclass(Encoder *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
    return PyErr_Format(PyExc_NotImplementedError, "a subclass of Encoder does this");
}

static PyMethodDef encoder_methods[] = {
    {"prepare", (PyCFunction)encoder_prepare, METH_VARARGS, "Use this pickler from now on."},
    {"small", (PyCFunction)encoder_small, METH_O, "Return the message of a usual value, or None: look at the lists."},
    {"encode", (PyCFunction)encoder_encode, METH_O, "Return a value as a message."},
    {"renew", (PyCFunction)encoder_left_to_subclass, METH_VARARGS, "Make another pickler and call `prepare`."},
    {"rest", (PyCFunction)encoder_left_to_subclass, METH_VARARGS, "Return the message where `small` returned None."},
    {"unusual", (PyCFunction)encoder_left_to_subclass, METH_VARARGS, "Return the message after an error."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot encoder_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, encoder_init},
    {Py_tp_dealloc, encoder_dealloc},
    {Py_tp_traverse, encoder_traverse},
    {Py_tp_clear, encoder_clear},
    {Py_tp_methods, encoder_methods},
    {0, NULL},
};

static PyType_Spec encoder_spec = {"raylane.core._native.Encoder", sizeof(Encoder), 0,
                                   TYPE_FLAGS | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, encoder_slots};

/* Sections of code that one thread at a time runs */

typedef struct {
    PyObject_HEAD
    PyThread_type_lock lock;
    unsigned long owner; /* thread that runs the section; read and written with the GIL */
    char locked;
} Section;

static int section_init(Section *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "", names)) return -1;
    if (self->lock) {
        PyErr_SetString(PyExc_TypeError, "a Section is initialised once");
        return -1;
    }
    self->lock = PyThread_allocate_lock();
    if (self->lock) return 0;
    PyErr_NoMemory();
    return -1;
}

static void section_dealloc(Section *self) {
    if (self->lock) PyThread_free_lock(self->lock);
    release_object((PyObject *)self);
}

/* Take the lock within a time. Returns 1 if it was taken, 0 if not, -1 after a signal whose handler has raised. */
static int section_take(Section *self, double timeout_s) {
    if (PyThread_acquire_lock(self->lock, NOWAIT_LOCK)) return 1;
    for (double until = now_s() + timeout_s; timeout_s > 0; timeout_s = until - now_s()) {
        PyLockStatus status;
        PY_TIMEOUT_T microseconds = (PY_TIMEOUT_T)((timeout_s < 1e6 ? timeout_s : 1e6) * 1e6);
        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(self->lock, microseconds, 1);
        Py_END_ALLOW_THREADS
        if (status == PY_LOCK_ACQUIRED) return 1;
        if (status == PY_LOCK_INTR && PyErr_CheckSignals()) return -1;
    }
    return 0;
}

static PyObject *section_run(Section *self, PyObject *args) {
    REQUIRE(self->lock);
    Py_ssize_t count = PyTuple_Size(args);
    if (count < 2) return PyErr_Format(PyExc_TypeError, "run takes a timeout, a function and its arguments");
    double timeout_s = PyFloat_AsDouble(PyTuple_GetItem(args, 0));
    PyObject *arguments = PyErr_Occurred() ? NULL : PyTuple_GetSlice(args, 2, count);
    if (!arguments) return NULL;
    int taken = section_take(self, timeout_s);
    PyObject *result = taken ? NULL : Py_NewRef(state_of(Py_TYPE((PyObject *)self))->busy);
    if (taken > 0) {
        self->owner = PyThread_get_thread_ident();
        self->locked = 1;
        /* A signal handler runs while Python code runs, not here: what is taken is released in any case. */
        result = PyObject_Call(PyTuple_GetItem(args, 1), arguments, NULL);
        self->locked = 0;
        PyThread_release_lock(self->lock);
    }
    Py_DECREF(arguments);
    return result;
}

static PyObject *section_runs_here(Section *self, PyObject *Py_UNUSED(ignored)) {
    return PyBool_FromLong(self->locked && self->owner == PyThread_get_thread_ident());
}

static PyObject *section_reset(Section *self, PyObject *Py_UNUSED(ignored)) {
    REQUIRE(self->lock);
    PyThread_type_lock lock = PyThread_allocate_lock(); /* the old one stays: a thread of the parent may hold it */
    if (!lock) return PyErr_NoMemory();
    self->lock = lock;
    self->locked = 0;
    Py_RETURN_NONE;
}

static PyMethodDef section_methods[] = {
    {"run", (PyCFunction)section_run, METH_VARARGS, "Call a function while no other thread runs this section."},
    {"runs_here", (PyCFunction)section_runs_here, METH_NOARGS, "Return True if the calling thread runs this section."},
    {"reset", (PyCFunction)section_reset, METH_NOARGS, "Make the section free, in a forked child."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef section_members[] = {
    {"locked", T_BOOL, offsetof(Section, locked), READONLY, "True while a thread runs this section."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot section_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, section_init},
    {Py_tp_dealloc, section_dealloc},
    {Py_tp_methods, section_methods},
    {Py_tp_members, section_members},
    {0, NULL},
};

static PyType_Spec section_spec = {"raylane.core._native.Section", sizeof(Section), 0, TYPE_FLAGS, section_slots};

/* Results of executions */

typedef struct {
    PyObject_HEAD
    PyObject *source, *values, *value, *error, *waiting, *leaf_errors;
    double submitted_s;
    Py_ssize_t number, messages_left;
    char done, wakes_asyncio;
} Result;

static int result_init(Result *self, PyObject *args, PyObject *kwargs) {
    if (self->source || kwargs || PyTuple_Size(args) != 5) {
        PyErr_SetString(PyExc_TypeError, "a Result is initialised once, with five values in their order");
        return -1;
    }
    /* Not by a format: one result is made for each execution. */
    self->number = PyLong_AsSsize_t(PyTuple_GetItem(args, 1));
    self->messages_left = PyLong_AsSsize_t(PyTuple_GetItem(args, 2));
    self->wakes_asyncio = PyTuple_GetItem(args, 4) == Py_True;
    self->source = Py_NewRef(PyTuple_GetItem(args, 0));
    self->values = Py_NewRef(PyTuple_GetItem(args, 3));
    self->leaf_errors = PyTuple_New(0);
    self->submitted_s = now_s();
    return PyErr_Occurred() ? -1 : 0;
}

static int result_traverse(Result *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->source);
    Py_VISIT(self->values);
    Py_VISIT(self->value);
    Py_VISIT(self->error);
    Py_VISIT(self->waiting);
    Py_VISIT(self->leaf_errors);
    return 0;
}

static int result_clear(Result *self) {
    Py_CLEAR(self->source);
    Py_CLEAR(self->values);
    Py_CLEAR(self->value);
    Py_CLEAR(self->error);
    Py_CLEAR(self->waiting);
    Py_CLEAR(self->leaf_errors);
    return 0;
}

static void result_dealloc(Result *self) {
    PyObject_GC_UnTrack((PyObject *)self);
    result_clear(self);
    release_object((PyObject *)self);
}

static PyObject *result_complete(Result *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "complete takes a value and an error or None");
    PyObject *source = self->source, *value = self->value, *error = self->error;
    self->value = Py_NewRef(args[0]);
    self->error = Py_NewRef(args[1]);
    self->source = Py_NewRef(Py_None);
    self->done = 1;
    Py_XDECREF(source); /* last: this may run any code */
    Py_XDECREF(value);
    Py_XDECREF(error);
    if (!self->waiting || self->waiting == Py_None) Py_RETURN_NONE;
    return PyObject_CallMethod((PyObject *)self, "wake", NULL);
}

static PyObject *result_is_done(Result *self, PyObject *Py_UNUSED(ignored)) { return PyBool_FromLong(self->done); }

static PyMethodDef result_methods[] = {
    {"complete", (PyCFunction)(void (*)(void))result_complete, METH_FASTCALL, "Set the value or the error."},
    {"_is_done", (PyCFunction)result_is_done, METH_NOARGS, "Return True if the result has a value or an error."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef result_members[] = {
    {"_source", T_OBJECT, offsetof(Result, source), READONLY, NULL},
    {"_values", T_OBJECT, offsetof(Result, values), 0, NULL},
    {"_value", T_OBJECT, offsetof(Result, value), READONLY, NULL},
    {"_error", T_OBJECT, offsetof(Result, error), READONLY, NULL},
    {"_waiting", T_OBJECT, offsetof(Result, waiting), 0, NULL},
    {"_done", T_BOOL, offsetof(Result, done), READONLY, NULL},
    {"_messages_left", T_PYSSIZET, offsetof(Result, messages_left), 0, NULL},
    {"_wakes_asyncio", T_BOOL, offsetof(Result, wakes_asyncio), READONLY, NULL},
    {"number", T_PYSSIZET, offsetof(Result, number), READONLY, NULL},
    {"submitted_s", T_DOUBLE, offsetof(Result, submitted_s), READONLY, NULL},
    {"leaf_errors", T_OBJECT, offsetof(Result, leaf_errors), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot result_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, result_init},
    {Py_tp_dealloc, result_dealloc},
    {Py_tp_traverse, result_traverse},
    {Py_tp_clear, result_clear},
    {Py_tp_methods, result_methods},
    {Py_tp_members, result_members},
    {0, NULL},
};

static PyType_Spec result_spec = {"raylane.core._native.Result", sizeof(Result), 0,
                                  TYPE_FLAGS | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, result_slots};

/* Times of tasks */

typedef struct {
    int64_t task, execution;
    double idle_since, started, returned, sent;
} Record;

typedef struct {
    PyObject_HEAD
    Record *records;
    Py_ssize_t kept, tasks;
    long long written;
    double *totals; /* count, waiting, computing, sending of each task */
    double idle_since, started, returned;
} Recorder;

static int recorder_init(Recorder *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"tasks", "kept", NULL};
    if (self->records) {
        PyErr_SetString(PyExc_TypeError, "a Recorder is initialised once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nn", names, &self->tasks, &self->kept)) return -1;
    if (self->tasks < 0 || self->kept < 1) {
        PyErr_SetString(PyExc_ValueError, "a Recorder keeps at least one record");
        return -1;
    }
    /* Pages of records that are never written cost no memory. */
    self->records = calloc((size_t)self->kept, sizeof(Record));
    self->totals = calloc((size_t)self->tasks * 4 + 1, sizeof(double));
    if (!self->records || !self->totals) {
        PyErr_NoMemory();
        return -1;
    }
    self->idle_since = now_s();
    return 0;
}

static void recorder_dealloc(Recorder *self) {
    free(self->records);
    free(self->totals);
    release_object((PyObject *)self);
}

static PyObject *recorder_started(Recorder *self, PyObject *Py_UNUSED(ignored)) {
    self->started = now_s();
    Py_RETURN_NONE;
}

static PyObject *recorder_returned(Recorder *self, PyObject *Py_UNUSED(ignored)) {
    self->returned = now_s();
    Py_RETURN_NONE;
}

static PyObject *recorder_sent(Recorder *self, PyObject *const *args, Py_ssize_t count) {
    REQUIRE(self->totals);
    if (count != 2) return PyErr_Format(PyExc_TypeError, "sent takes task and execution");
    long long task = PyLong_AsLongLong(args[0]), execution = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (task < 0 || task >= self->tasks) return PyErr_Format(PyExc_ValueError, "there is no task %lld", task);
    double sent = now_s();
    self->records[self->written++ % self->kept] =
        (Record){task, execution, self->idle_since, self->started, self->returned, sent};
    double *totals = self->totals + task * 4;
    totals[0] += 1;
    totals[1] += self->started - self->idle_since;
    totals[2] += self->returned - self->started;
    totals[3] += sent - self->returned;
    self->idle_since = sent;
    Py_RETURN_NONE;
}

static PyObject *recorder_records(Recorder *self, PyObject *Py_UNUSED(ignored)) {
    REQUIRE(self->totals);
    long long first = self->written > self->kept ? self->written - self->kept : 0;
    PyObject *found = PyList_New((Py_ssize_t)(self->written - first));
    for (long long i = first; found && i < self->written; i++) {
        Record *record = &self->records[i % self->kept];
        PyObject *one = Py_BuildValue("(LLdddd)", (long long)record->task, (long long)record->execution,
                                      record->idle_since, record->started, record->returned, record->sent);
        if (one)
            PyList_SetItem(found, (Py_ssize_t)(i - first), one);
        else
            Py_CLEAR(found);
    }
    return found;
}

static PyObject *recorder_totals(Recorder *self, PyObject *number) {
    REQUIRE(self->totals);
    Py_ssize_t task = PyLong_AsSsize_t(number);
    if (task == -1 && PyErr_Occurred()) return NULL;
    if (task < 0 || task >= self->tasks) return PyErr_Format(PyExc_ValueError, "there is no task %zd", task);
    double *totals = self->totals + task * 4;
    return Py_BuildValue("(Lddd)", (long long)totals[0], totals[1], totals[2], totals[3]);
}

static PyMethodDef recorder_methods[] = {
    {"started", (PyCFunction)recorder_started, METH_NOARGS, "Note that a call begins."},
    {"returned", (PyCFunction)recorder_returned, METH_NOARGS, "Note that the call has returned."},
    {"sent", (PyCFunction)(void (*)(void))recorder_sent, METH_FASTCALL, "Note that the results were sent."},
    {"records", (PyCFunction)recorder_records, METH_NOARGS, "Return the records, oldest first."},
    {"totals", (PyCFunction)recorder_totals, METH_O, "Return (count, waiting, computing, sending) of a task."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot recorder_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, recorder_init},
    {Py_tp_dealloc, recorder_dealloc},
    {Py_tp_methods, recorder_methods},
    {0, NULL},
};

static PyType_Spec recorder_spec = {"raylane.core._native.Recorder", sizeof(Recorder), 0, TYPE_FLAGS, recorder_slots};

/* Executions that are under way */

typedef struct {
    PyObject_HEAD
    ModuleState *state; /* looked up once: for a subclass that takes a microsecond */
    PyObject *pending;
    Recorder *recorder;
    long long submitted, completed;
} Executions;

static int executions_init(Executions *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"pending", "recorder", NULL};
    PyObject *pending, *recorder;
    if (self->pending) {
        PyErr_SetString(PyExc_TypeError, "Executions are initialised once");
        return -1;
    }
    self->state = state_of(Py_TYPE((PyObject *)self));
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!", names, &pending, self->state->recorder, &recorder)) return -1;
    self->pending = Py_NewRef(pending);
    self->recorder = (Recorder *)Py_NewRef(recorder);
    return 0;
}

static int executions_traverse(Executions *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->pending);
    return 0;
}

static int executions_clear(Executions *self) {
    Py_CLEAR(self->pending);
    return 0;
}

static void executions_dealloc(Executions *self) {
    PyObject_GC_UnTrack((PyObject *)self);
    Py_CLEAR(self->pending);
    Py_XDECREF((PyObject *)self->recorder);
    release_object((PyObject *)self);
}

static PyObject *executions_find(Executions *self, PyObject *number) {
    REQUIRE(self->pending);
    long long execution = PyLong_AsLongLong(number);
    if (execution == -1 && PyErr_Occurred()) return NULL;
    Py_ssize_t size = PySequence_Size(self->pending);
    if (size < 0) return NULL;
    if (execution < self->completed || execution - self->completed >= size) Py_RETURN_NONE;
    return PySequence_GetItem(self->pending, (Py_ssize_t)(execution - self->completed));
}

static PyObject *executions_end_oldest(Executions *self, PyObject *Py_UNUSED(ignored)) {
    REQUIRE(self->pending);
    Recorder *recorder = self->recorder;
    REQUIRE(recorder->records);
    PyObject *oldest = PySequence_GetItem(self->pending, 0);
    if (!oldest) return NULL;
    Result *result = (Result *)oldest;
    if (!PyType_IsSubtype(Py_TYPE(oldest), self->state->result)) {
        PyErr_SetString(PyExc_TypeError, "pending executions are Results");
    } else if (!PySequence_DelItem(self->pending, 0)) {
        double submitted = result->submitted_s;
        recorder->records[recorder->written++ % recorder->kept] =
            (Record){0, result->number, submitted, submitted, submitted, now_s()};
        self->completed++;
        return oldest;
    }
    Py_DECREF(oldest);
    return NULL;
}

static PyObject *executions_settle(Executions *self, PyObject *const *args, Py_ssize_t count) {
    REQUIRE(self->pending);
    if (count != 2 || !PyType_IsSubtype(Py_TYPE(args[0]), self->state->result))
        return PyErr_Format(PyExc_TypeError, "settle takes a Result and an index");
    Result *result = (Result *)args[0];
    Py_ssize_t output = PyLong_AsSsize_t(args[1]);
    if (output == -1 && PyErr_Occurred()) return NULL;
    if (result->messages_left > 1) {
        result->messages_left--;
        Py_RETURN_FALSE;
    }
    if (output < 0 || result->done || !result->values || !PyList_Check(result->values) ||
        output >= PyList_Size(result->values))
        Py_RETURN_NONE;
    PyObject *ended = executions_end_oldest(self, NULL);
    if (!ended) return NULL;
    result->messages_left = 0;
    PyObject *values = result->values, *outcome[] = {PyList_GetItem(values, output), Py_None};
    result->values = Py_NewRef(Py_None);
    PyObject *done = result_complete(result, outcome, 2);
    Py_DECREF(values);
    Py_DECREF(ended);
    Py_XDECREF(done);
    return done ? Py_NewRef(Py_True) : NULL;
}

static PyMethodDef executions_methods[] = {
    {"find", (PyCFunction)executions_find, METH_O, "Return the result of an execution, or None."},
    {"end_oldest", (PyCFunction)executions_end_oldest, METH_NOARGS, "Remove and return the oldest result."},
    {"settle", (PyCFunction)(void (*)(void))executions_settle, METH_FASTCALL,
     "Note that a message of an execution was read; complete its result after the last one."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef executions_members[] = {
    {"pending", T_OBJECT, offsetof(Executions, pending), READONLY, NULL},
    {"submitted", T_LONGLONG, offsetof(Executions, submitted), 0, NULL},
    {"completed", T_LONGLONG, offsetof(Executions, completed), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot executions_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, executions_init},
    {Py_tp_dealloc, executions_dealloc},
    {Py_tp_traverse, executions_traverse},
    {Py_tp_clear, executions_clear},
    {Py_tp_methods, executions_methods},
    {Py_tp_members, executions_members},
    {0, NULL},
};

static PyType_Spec executions_spec = {"raylane.core._native.Executions", sizeof(Executions), 0,
                                      TYPE_FLAGS | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, executions_slots};

/* Run delay */

static PyObject *run_delay_ns(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    /* Second field of /proc/thread-self/schedstat: ns spent runnable without a CPU (Linux, sched-stats.rst). */
    char text[128];
    long long ran, delayed = 0;
    int fd = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return PyLong_FromLong(0);
    ssize_t size = read(fd, text, sizeof(text) - 1);
    close(fd);
    text[size > 0 ? size : 0] = 0;
    return PyLong_FromLongLong(sscanf(text, "%lld %lld", &ran, &delayed) == 2 ? delayed : 0);
}

/* Large copies */

typedef struct {
    char *target;
    const char *source;
    size_t nbytes;
} Piece;

static void *copy_piece(void *argument) {
    Piece *piece = argument;
    memcpy(piece->target, piece->source, piece->nbytes);
    return NULL;
}

static PyObject *copy(PyObject *Py_UNUSED(module), PyObject *args) {
    enum { MOST = 16 };
    Py_buffer target, source;
    int threads;
    if (!PyArg_ParseTuple(args, "w*y*i", &target, &source, &threads)) return NULL;
    PyObject *done = NULL;
    if (target.len != source.len) {
        PyErr_Format(PyExc_ValueError, "cannot copy %zd bytes into %zd", source.len, target.len);
    } else if (threads < 1 || threads > MOST) {
        PyErr_Format(PyExc_ValueError, "between 1 and %d threads can copy, got %d", MOST, threads);
    } else {
        Py_BEGIN_ALLOW_THREADS
        pthread_t started[MOST];
        Piece pieces[MOST];
        size_t size = ((size_t)target.len / (size_t)threads + 63) / 64 * 64, at = 0, total = (size_t)target.len;
        int running = 0;
        /* This thread copies the last piece, and whatever no thread could be started for. */
        for (; running < threads - 1 && total - at > size; running++) {
            pieces[running] = (Piece){(char *)target.buf + at, (char *)source.buf + at, size};
            if (pthread_create(&started[running], NULL, copy_piece, &pieces[running])) break;
            at += size;
        }
        memcpy((char *)target.buf + at, (char *)source.buf + at, total - at);
        for (int i = 0; i < running; i++) pthread_join(started[i], NULL);
        Py_END_ALLOW_THREADS
        done = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    return done;
}

/* Many copies */

typedef struct {
    const uint64_t *rows;
    Py_ssize_t count;
    atomic_size_t next;
} CopyList;

static void *copy_rows(void *argument) {
    enum { AT_ONCE = 4 };
    CopyList *list = argument;
    size_t first, count = (size_t)list->count;
    while ((first = atomic_fetch_add(&list->next, AT_ONCE)) < count) {
        for (size_t i = first; i < count && i < first + AT_ONCE; i++) {
            const uint64_t *row = list->rows + 3 * i;
            memcpy((void *)(uintptr_t)row[0], (const void *)(uintptr_t)row[1], (size_t)row[2]);
        }
    }
    return NULL;
}

static PyObject *copy_many(PyObject *Py_UNUSED(module), PyObject *args) {
    enum { MOST = 16 };
    Py_buffer rows;
    int threads;
    if (!PyArg_ParseTuple(args, "y*i", &rows, &threads)) return NULL;
    PyObject *done = NULL;
    if (rows.len % (3 * 8)) {
        PyErr_Format(PyExc_ValueError, "a list of copies has three 64-bit numbers for each, got %zd bytes", rows.len);
    } else if (threads < 1 || threads > MOST) {
        PyErr_Format(PyExc_ValueError, "between 1 and %d threads can copy, got %d", MOST, threads);
    } else {
        Py_BEGIN_ALLOW_THREADS
        CopyList list = {rows.buf, rows.len / (3 * 8), 0};
        pthread_t started[MOST];
        int running = 0;
        while (running < threads - 1 && !pthread_create(&started[running], NULL, copy_rows, &list)) running++;
        copy_rows(&list);
        for (int i = 0; i < running; i++) pthread_join(started[i], NULL);
        Py_END_ALLOW_THREADS
        done = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&rows);
    return done;
}

/* Digests */

/* The digest of a tensor is the sum, modulo 2^64, over its words of coefficient(position) * folded(word). A word is an
 * element of 1, 2 or 4 bytes; larger elements are several words of 4 bytes. The position is that in the whole tensor,
 * so sums of regions add up to the sum of the tensor, in any order and division.
 *
 * A coefficient is the product of two odd numbers: one for the block of BLOCK_WORDS words, one for the place in it. So
 * each word costs one multiplication of 32 bits, which compilers vectorise for the oldest processor of a platform. An odd
 * number times a difference of less than 32 bits is never 0 modulo 2^64, so the change of a single word is always found.
 * Several changes cancel out with a probability of about 2^-48: `folded` puts the upper half of a word into the lower
 * one too, as differences in the highest bits alone would leave few bits of the sum to differ. A word of zero counts.
 */
enum { BLOCK_WORDS = 1024, DIGEST_COLUMNS = 13, LINES = 64, LINE_WORDS = 64 };

static uint32_t coefficients[BLOCK_WORDS]; /* filled when the module is made, always with the same numbers */
static const uint32_t FOLD = 0x9E3779B9u;

typedef uint8_t __attribute__((may_alias)) Word1;
typedef uint16_t __attribute__((aligned(1), may_alias)) Word2;
typedef uint32_t __attribute__((aligned(1), may_alias)) Word4;

/* The final mix of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014). */
static uint64_t mixed(uint64_t number) {
    number += 0x9E3779B97F4A7C15u;
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9u;
    number = (number ^ (number >> 27)) * 0x94D049BB133111EBu;
    return number ^ (number >> 31);
}

static void fill_coefficients(void) {
    for (uint64_t i = 0; i < BLOCK_WORDS; i++) coefficients[i] = (uint32_t)(mixed(~i) >> 32) | 1;
}

/* GCC vectorises loops of unknown length at -O3 only; Clang does at -O2, which the build uses. */
#if defined(__GNUC__) && !defined(__clang__)
#define VECTORISED __attribute__((optimize("O3")))
#else
#define VECTORISED
#endif

static inline uint32_t fold1(uint32_t word) { return word ^ FOLD; }
static inline uint32_t fold2(uint32_t word) { return word ^ FOLD; }
static inline uint32_t fold4(uint32_t word) { return word ^ (word >> 16) ^ FOLD; }

/* For each word size: the sum of adjacent words within a block; the copy of lines whose words are apart. */
#define FUNCTIONS_FOR(SIZE)                                                                                       \
    VECTORISED static uint64_t sum##SIZE(const Word##SIZE *words, size_t count, const uint32_t *coefficient) {    \
        uint64_t sum = 0;                                                                                         \
        for (size_t i = 0; i < count; i++) sum += (uint64_t)fold##SIZE(words[i]) * coefficient[i];                \
        return sum;                                                                                               \
    }                                                                                                             \
    static void gather##SIZE(Word##SIZE *into, const char *from, size_t lines, size_t words, size_t line_stride,  \
                             size_t word_stride) {                                                                \
        for (size_t word = 0; word < words; word++) /* lines innermost: they may be adjacent in memory */         \
            for (size_t line = 0; line < lines; line++)                                                           \
                into[line * LINE_WORDS + word] =                                                                  \
                    *(const Word##SIZE *)(from + line * line_stride + word * word_stride);                        \
    }
FUNCTIONS_FOR(1)
FUNCTIONS_FOR(2)
FUNCTIONS_FOR(4)

/* Return the sum of adjacent words whose positions are adjacent too. */
static uint64_t sum_adjacent(const char *at, size_t size, size_t count, uint64_t position) {
    uint64_t total = 0;
    while (count) {
        size_t first = (size_t)(position % BLOCK_WORDS), words = BLOCK_WORDS - first;
        const uint32_t *coefficient = coefficients + first;
        if (words > count) words = count;
        uint64_t sum = size == 1   ? sum1((const Word1 *)at, words, coefficient)
                       : size == 2 ? sum2((const Word2 *)at, words, coefficient)
                                   : sum4((const Word4 *)at, words, coefficient);
        total += sum * (mixed(position / BLOCK_WORDS) | 1);
        at += words * size;
        position += words;
        count -= words;
    }
    return total;
}

/* A region: words in three dimensions, with the distance of two words in memory, in bytes, and in the whole tensor. */
typedef struct {
    uint64_t address, size, number, position, count[3], stride[3], step[3];
} DigestRow;

_Static_assert(sizeof(DigestRow) == DIGEST_COLUMNS * sizeof(uint64_t), "a row has no padding");

/* Return the sum of one plane whose words are apart in memory. Lines are made adjacent in a buffer that stays cached. */
static uint64_t sum_gathered(const DigestRow *row, const char *plane, uint64_t position) {
    uint64_t total = 0;
    uint32_t lines[LINES * LINE_WORDS];
    for (size_t word = 0; word < row->count[2]; word += LINE_WORDS) {
        size_t words = row->count[2] - word < LINE_WORDS ? (size_t)row->count[2] - word : LINE_WORDS;
        for (size_t line = 0; line < row->count[1]; line += LINES) {
            size_t count = row->count[1] - line < LINES ? (size_t)row->count[1] - line : LINES;
            const char *from = plane + line * row->stride[1] + word * row->stride[2];
            if (row->size == 1) gather1((Word1 *)lines, from, count, words, row->stride[1], row->stride[2]);
            if (row->size == 2) gather2((Word2 *)lines, from, count, words, row->stride[1], row->stride[2]);
            if (row->size == 4) gather4((Word4 *)lines, from, count, words, row->stride[1], row->stride[2]);
            for (size_t i = 0; i < count; i++)
                total += sum_adjacent((char *)lines + i * LINE_WORDS * row->size, row->size, words,
                                      position + (line + i) * row->step[1] + word);
        }
    }
    return total;
}

static uint64_t sum_region(const DigestRow *row) {
    uint64_t total = 0;
    for (size_t outer = 0; outer < row->count[0]; outer++) {
        const char *plane = (const char *)(uintptr_t)row->address + outer * row->stride[0];
        uint64_t position = row->position + outer * row->step[0];
        if (row->step[2] == 1 && row->stride[2] != row->size) {
            total += sum_gathered(row, plane, position);
            continue;
        }
        for (size_t line = 0; line < row->count[1]; line++) {
            const char *at = plane + line * row->stride[1];
            uint64_t first = position + line * row->step[1];
            if (row->step[2] == 1) {
                total += sum_adjacent(at, row->size, row->count[2], first);
                continue;
            }
            for (size_t word = 0; word < row->count[2]; word++)
                total += sum_adjacent(at + word * row->stride[2], row->size, 1, first + word * row->step[2]);
        }
    }
    return total;
}

typedef struct {
    const DigestRow *rows;
    size_t count;
    uint64_t *sums;
    atomic_size_t next;
} DigestList;

static void *sum_regions(void *argument) {
    enum { AT_ONCE = 4 };
    DigestList *list = argument;
    size_t first;
    while ((first = atomic_fetch_add(&list->next, AT_ONCE)) < list->count)
        for (size_t i = first; i < list->count && i < first + AT_ONCE; i++)
            __atomic_fetch_add(&list->sums[list->rows[i].number], sum_region(&list->rows[i]), __ATOMIC_RELAXED);
    return NULL;
}

/* Return 0 if each row has a size that is known and the number of a sum; else -1 with ValueError. */
static int check_rows(const DigestList *list, size_t sums) {
    for (size_t i = 0; i < list->count; i++) {
        const DigestRow *row = &list->rows[i];
        if ((row->size == 1 || row->size == 2 || row->size == 4) && row->number < sums) continue;
        PyErr_Format(PyExc_ValueError, "row %zu has words of %llu bytes for sum %llu of %zu", i,
                     (unsigned long long)row->size, (unsigned long long)row->number, sums);
        return -1;
    }
    return 0;
}

static PyObject *add_digests(PyObject *Py_UNUSED(module), PyObject *args) {
    enum { MOST = 16 };
    Py_buffer rows, sums;
    int threads;
    if (!PyArg_ParseTuple(args, "y*w*i", &rows, &sums, &threads)) return NULL;
    PyObject *done = NULL;
    DigestList list = {rows.buf, (size_t)rows.len / sizeof(DigestRow), sums.buf, 0};
    if ((size_t)rows.len % sizeof(DigestRow) || sums.len % 8) {
        PyErr_Format(PyExc_ValueError, "rows have %d 64-bit numbers each and sums one, got %zd and %zd bytes",
                     DIGEST_COLUMNS, rows.len, sums.len);
    } else if (threads < 1 || threads > MOST) {
        PyErr_Format(PyExc_ValueError, "between 1 and %d threads can compute, got %d", MOST, threads);
    } else if (!check_rows(&list, (size_t)sums.len / 8)) {
        Py_BEGIN_ALLOW_THREADS
        pthread_t started[MOST];
        int running = 0;
        while (running < threads - 1 && !pthread_create(&started[running], NULL, sum_regions, &list)) running++;
        sum_regions(&list);
        for (int i = 0; i < running; i++) pthread_join(started[i], NULL);
        Py_END_ALLOW_THREADS
        done = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&sums);
    return done;
}

static PyMethodDef functions[] = {
    {"add_digests", add_digests, METH_VARARGS, "Add the digests of regions to sums, without the GIL."},
    {"copy_many", copy_many, METH_VARARGS, "Copy a list of (target, source, bytes), without the GIL."},
    {"copy", copy, METH_VARARGS, "Copy bytes with several threads, without the GIL."},
    {"run_delay_ns", run_delay_ns, METH_NOARGS, "Return how long this thread was runnable without a CPU."},
    {NULL, NULL, 0, NULL},
};

static int fill_module(PyObject *module) {
    fill_coefficients();
    ModuleState *state = PyModule_GetState(module);
    PyType_Spec *specs[] = {&doorbell_spec, &slot_reader_spec, &slot_writer_spec,
                            &encoder_spec,  &section_spec,     &result_spec,      &recorder_spec, &executions_spec};
    for (size_t i = 0; i < sizeof(specs) / sizeof(*specs); i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[i], NULL);
        if (!type) return -1;
        if (specs[i] == &doorbell_spec) state->doorbell = (PyTypeObject *)Py_NewRef(type);
        if (specs[i] == &result_spec) state->result = (PyTypeObject *)Py_NewRef(type);
        if (specs[i] == &recorder_spec) state->recorder = (PyTypeObject *)Py_NewRef(type);
        int failed = PyModule_AddType(module, (PyTypeObject *)type);
        Py_DECREF(type);
        if (failed) return -1;
    }
    state->busy = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    if (!state->busy || PyModule_AddObjectRef(module, "BUSY", state->busy)) return -1;
    state->damaged_ring = PyErr_NewException("raylane.core._native.DamagedRing", PyExc_AssertionError, NULL);
    if (!state->damaged_ring || PyModule_AddObjectRef(module, "DamagedRing", state->damaged_ring)) return -1;
    return PyModule_AddIntMacro(module, SLOT_HEADER_BYTES) || PyModule_AddIntMacro(module, FLAGS) ||
                   PyModule_AddIntMacro(module, PAGE_BYTES) || PyModule_AddIntMacro(module, WAKE) ||
                   PyModule_AddIntMacro(module, LOGGED) || PyModule_AddIntMacro(module, VALUE) || PyModule_AddIntMacro(module, NOTHING) ||
                   PyModule_AddIntMacro(module, BYTES) || PyModule_AddIntMacro(module, TEXT) ||
                   PyModule_AddIntMacro(module, DESCRIPTOR_BYTES)
               ? -1
               : 0;
}

static int visit_state(PyObject *module, visitproc visit, void *arg) {
    ModuleState *state = PyModule_GetState(module);
    Py_VISIT(state->doorbell);
    Py_VISIT(state->result);
    Py_VISIT(state->recorder);
    Py_VISIT(state->busy);
    Py_VISIT(state->damaged_ring);
    return 0;
}

static int clear_state(PyObject *module) {
    ModuleState *state = PyModule_GetState(module);
    Py_CLEAR(state->doorbell);
    Py_CLEAR(state->result);
    Py_CLEAR(state->recorder);
    Py_CLEAR(state->busy);
    Py_CLEAR(state->damaged_ring);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill_module}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "raylane.core._native",
    .m_doc = "Operations on every message of a compiled graph.",
    .m_size = sizeof(ModuleState),
    .m_traverse = visit_state,
    .m_clear = clear_state,
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }
