/* Operations on every message of a compiled graph, in C: slots of a ring, semaphores, waiting, pickling of small values.
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

enum { SLOT_HEADER = 16, FLAGS_AT = 64, FLAGS = 256, SLEEPS_AT = 48, PAGE = 4096, WAKE = 4, LOGGED = 32, TEXT = 6 };

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
    if (PyErr_Occurred() || take_memory(page, &self->page, PAGE)) return -1;
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
    long long sequence;
} SlotReader;

static int check_slots(Py_buffer *memory, Py_ssize_t at, Py_ssize_t slots, Py_ssize_t slot_bytes) {
    if (at >= 0 && slots > 0 && slot_bytes >= SLOT_HEADER && at <= memory->len &&
        slots <= (memory->len - at) / slot_bytes)
        return 0;
    PyErr_Format(PyExc_ValueError, "%zd slots of %zd bytes at offset %zd do not fit into %zd bytes", slots, slot_bytes,
                 at, memory->len);
    return -1;
}

typedef struct {
    PyTypeObject *doorbell;
} ModuleState;

static int reader_init(SlotReader *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"memory", "full_at", "slots_at", "slots", "slot_bytes", "doorbell", NULL};
    PyObject *memory;
    Doorbell *doorbell;
    Py_ssize_t full_at;
    ModuleState *state = PyType_GetModuleState(Py_TYPE((PyObject *)self)); /* there are no subclasses */
    if (!state) return -1;
    if (self->memory.obj) {
        PyErr_SetString(PyExc_TypeError, "a SlotReader is initialised once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OnnnnO!", names, &memory, &full_at, &self->slots_at, &self->slots,
                                     &self->slot_bytes, state->doorbell, &doorbell))
        return -1;
    if (take_memory(memory, &self->memory, 0)) return -1;
    if (check_slots(&self->memory, self->slots_at, self->slots, self->slot_bytes)) return -1;
    self->full = semaphore_at(&self->memory, full_at);
    if (!self->full) return -1;
    self->doorbell = (Doorbell *)Py_NewRef((PyObject *)doorbell);
    return 0;
}

static void reader_dealloc(SlotReader *self) {
    if (self->memory.obj) PyBuffer_Release(&self->memory);
    Py_XDECREF((PyObject *)self->doorbell);
    release_object((PyObject *)self);
}

static PyObject *reader_take(SlotReader *self, PyObject *Py_UNUSED(ignored)) {
    REQUIRE(self->doorbell);
    const char *slot =
        (char *)self->memory.buf + self->slots_at + (Py_ssize_t)(self->sequence % self->slots) * self->slot_bytes;
    uint64_t sequence;
    uint32_t size;
    uint16_t count;
    memcpy(&sequence, slot, 8);
    memcpy(&size, slot + 8, 4);
    memcpy(&count, slot + 14, 2);
    unsigned char kind = (unsigned char)slot[12], flags = (unsigned char)slot[13];
    if (sequence != (uint64_t)self->sequence)
        return PyErr_Format(PyExc_AssertionError, "message %llu in the place of message %lld: a ring was overrun",
                            (unsigned long long)sequence, self->sequence);
    /* Before anything can fail: the message is consumed in any case. */
    self->sequence++;
    self->doorbell->read++;
    PyObject *body;
    if (count || kind == TEXT) {
        body = Py_NewRef(Py_None);
    } else {
        if (size > self->slot_bytes - SLOT_HEADER)
            return PyErr_Format(PyExc_AssertionError, "a message of %u bytes does not fit into a slot", size);
        body = PyBytes_FromStringAndSize(slot + SLOT_HEADER, size);
    }
    PyObject *found = body ? PyTuple_New(3) : NULL;
    if (!found) {
        Py_XDECREF(body);
        return NULL;
    }
    PyTuple_SetItem(found, 0, PyLong_FromLong(kind)); /* a small int: cannot fail */
    PyTuple_SetItem(found, 1, PyLong_FromLong(flags));
    PyTuple_SetItem(found, 2, body);
    return found;
}

static PyObject *reader_poll(SlotReader *self, PyObject *ignored) {
    REQUIRE(self->doorbell);
    if (sem_trywait(self->full)) Py_RETURN_NONE;
    return reader_take(self, ignored);
}

static PyObject *reader_text(SlotReader *self, PyObject *Py_UNUSED(ignored)) {
    REQUIRE(self->doorbell);
    if (!self->sequence) return PyErr_Format(PyExc_ValueError, "no message was taken");
    const char *slot =
        (char *)self->memory.buf + self->slots_at + (Py_ssize_t)((self->sequence - 1) % self->slots) * self->slot_bytes;
    uint32_t size;
    memcpy(&size, slot + 8, 4);
    if (size > self->slot_bytes - SLOT_HEADER)
        return PyErr_Format(PyExc_AssertionError, "a message of %u bytes does not fit into a slot", size);
    return PyUnicode_DecodeUTF8(slot + SLOT_HEADER, size, "surrogatepass"); /* as pickle does */
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
    Py_ssize_t room = self->slot_bytes - SLOT_HEADER - 8 * (Py_ssize_t)count;
    if (room < 0) return PyErr_Format(PyExc_AssertionError, "%d buffers do not fit into a slot", (int)count);
    const char *sizes = slot + SLOT_HEADER, *at = sizes + 8 * (Py_ssize_t)count;
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
    {"text", (PyCFunction)reader_text, METH_NOARGS, "Return the string of the message that was taken last."},
    {"parts", (PyCFunction)reader_parts, METH_NOARGS, "Return (body, buffers) of the message that was taken last."},
    {"take", (PyCFunction)reader_take, METH_NOARGS, "Read the next message, after a successful wait for it."},
    {"poll", (PyCFunction)reader_poll, METH_NOARGS, "Read the next message, or return None if there is none."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef reader_members[] = {
    {"sequence", T_LONGLONG, offsetof(SlotReader, sequence), READONLY, "Number of the next message."},
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

static PyType_Spec slot_reader_spec = {"raylane.core._native.SlotReader", sizeof(SlotReader), 0, TYPE_FLAGS,
                                       slot_reader_slots};

typedef struct {
    Py_buffer page;
    sem_t *semaphore;
    unsigned char *flag;
} Bell;

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Py_ssize_t slots_at, slots, slot_bytes, readers;
    sem_t **fulls;
    Bell *bells;
    int wake_fd, ready;
    long long bytes;
} SlotWriter;

static int writer_init(SlotWriter *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"memory", "slots_at", "slots", "slot_bytes", "readers", NULL};
    PyObject *memory, *readers;
    if (self->memory.obj) {
        PyErr_SetString(PyExc_TypeError, "a SlotWriter is initialised once");
        return -1;
    }
    self->wake_fd = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OnnnO!", names, &memory, &self->slots_at, &self->slots,
                                     &self->slot_bytes, &PyTuple_Type, &readers))
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
        if (!self->fulls[i] || take_memory(page, &self->bells[i].page, PAGE)) return -1;
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
static char *slot_for(SlotWriter *self, PyObject *const *args, long long *sequence, long *kind, long *flags) {
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

static PyObject *writer_write(SlotWriter *self, PyObject *const *args, Py_ssize_t count) {
    REQUIRE(self->ready);
    if (count != 4) return PyErr_Format(PyExc_TypeError, "write takes sequence, kind, flags and body");
    long long sequence;
    long kind, flags;
    char *slot = slot_for(self, args, &sequence, &kind, &flags);
    Py_buffer body = {0};
    if (!slot) return NULL;
    if (PyUnicode_Check(args[3])) {
        /* The characters of a string in ASCII are its bytes in UTF-8: no copy is made. */
        body.buf = (void *)PyUnicode_AsUTF8AndSize(args[3], &body.len);
        if (!body.buf) return NULL;
        if (body.len != PyUnicode_GetLength(args[3])) return PyErr_Format(PyExc_TypeError, "a string must be in ASCII");
    } else if (PyObject_GetBuffer(args[3], &body, PyBUF_SIMPLE)) {
        return NULL;
    }
    if (body.len > self->slot_bytes - SLOT_HEADER) {
        PyErr_Format(PyExc_ValueError, "%zd bytes do not fit into a slot of %zd", body.len, self->slot_bytes);
        PyBuffer_Release(&body);
        return NULL;
    }
    fill_header(slot, sequence, (uint32_t)body.len, kind, flags, 0);
    memcpy(slot + SLOT_HEADER, body.buf, (size_t)body.len);
    self->bytes += body.len;
    PyBuffer_Release(&body);
    notify_readers(self, (int)flags);
    Py_RETURN_NONE;
}

static PyObject *writer_write_parts(SlotWriter *self, PyObject *const *args, Py_ssize_t count) {
    REQUIRE(self->ready);
    if (count != 5 || !PyList_Check(args[4]))
        return PyErr_Format(PyExc_TypeError, "write_parts takes sequence, kind, flags, body and a list of buffers");
    long long sequence;
    long kind, flags;
    char *slot = slot_for(self, args, &sequence, &kind, &flags);
    if (!slot) return NULL;
    Py_ssize_t parts = PyList_Size(args[4]), room = (self->slot_bytes - SLOT_HEADER) / 8, total = 0;
    if (parts > UINT16_MAX || parts > room)
        return PyErr_Format(PyExc_ValueError, "%zd buffers do not fit into a slot of %zd bytes", parts, self->slot_bytes);
    room = self->slot_bytes - SLOT_HEADER - 8 * parts;
    char *sizes = slot + SLOT_HEADER, *at = sizes + 8 * parts;
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

static PyMethodDef writer_methods[] = {
    {"write", (PyCFunction)(void (*)(void))writer_write, METH_FASTCALL, "Write one small message; notify the readers."},
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

static PyType_Spec slot_writer_spec = {"raylane.core._native.SlotWriter", sizeof(SlotWriter), 0, TYPE_FLAGS,
                                       slot_writer_slots};

/* Pickler of small values */

typedef struct {
    PyObject_HEAD
    PyObject *dump, *forget, *output, *buffers;
    Py_ssize_t limit;
} SmallPickler;

static int pickler_init(SmallPickler *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"dump", "forget", "output", "buffers", "limit", NULL};
    PyObject *dump, *forget, *output, *buffers;
    Py_ssize_t limit;
    if (self->dump) {
        PyErr_SetString(PyExc_TypeError, "a SmallPickler is initialised once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO!O!n", names, &dump, &forget, &PyList_Type, &output,
                                     &PyList_Type, &buffers, &limit))
        return -1;
    self->dump = Py_NewRef(dump);
    self->forget = Py_NewRef(forget);
    self->output = Py_NewRef(output);
    self->buffers = Py_NewRef(buffers);
    self->limit = limit;
    return 0;
}

static int pickler_clear(SmallPickler *self) {
    Py_CLEAR(self->dump);
    Py_CLEAR(self->forget);
    Py_CLEAR(self->output);
    Py_CLEAR(self->buffers);
    return 0;
}

static int pickler_traverse(SmallPickler *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->dump);
    Py_VISIT(self->forget);
    Py_VISIT(self->output);
    Py_VISIT(self->buffers);
    return 0;
}

static void pickler_dealloc(SmallPickler *self) {
    PyObject_GC_UnTrack((PyObject *)self);
    pickler_clear(self);
    release_object((PyObject *)self);
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

static PyObject *pickler_encode(SmallPickler *self, PyObject *value) {
    if (!self->dump) Py_RETURN_NONE;
    PyObject *done = PyObject_CallFunctionObjArgs(self->dump, value, NULL);
    if (!done) return NULL;
    Py_DECREF(done);
    done = PyObject_CallNoArgs(self->forget);
    if (!done) return NULL;
    Py_DECREF(done);
    if (PyList_Size(self->output) != 1 || PyList_Size(self->buffers)) Py_RETURN_NONE;
    PyObject *body = PyList_GetItem(self->output, 0);
    if (!PyBytes_Check(body) || PyBytes_Size(body) >= self->limit) Py_RETURN_NONE;
    if (names_script(PyBytes_AsString(body), (size_t)PyBytes_Size(body))) Py_RETURN_NONE;
    Py_INCREF(body);
    if (PyList_SetSlice(self->output, 0, 1, NULL)) Py_CLEAR(body);
    return body;
}

static PyMethodDef pickler_methods[] = {
    {"encode", (PyCFunction)pickler_encode, METH_O, "Return the pickle of a small value, or None: look at the lists."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot small_pickler_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, pickler_init},
    {Py_tp_dealloc, pickler_dealloc},
    {Py_tp_traverse, pickler_traverse},
    {Py_tp_clear, pickler_clear},
    {Py_tp_methods, pickler_methods},
    {0, NULL},
};

static PyType_Spec small_pickler_spec = {"raylane.core._native.SmallPickler", sizeof(SmallPickler), 0,
                                         TYPE_FLAGS | Py_TPFLAGS_HAVE_GC, small_pickler_slots};

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

static PyMethodDef functions[] = {
    {"copy_many", copy_many, METH_VARARGS, "Copy a list of (target, source, bytes), without the GIL."},
    {"copy", copy, METH_VARARGS, "Copy bytes with several threads, without the GIL."},
    {"run_delay_ns", run_delay_ns, METH_NOARGS, "Return how long this thread was runnable without a CPU."},
    {NULL, NULL, 0, NULL},
};

static int add_types(PyObject *module) {
    ModuleState *state = PyModule_GetState(module);
    PyType_Spec *specs[] = {&doorbell_spec, &slot_reader_spec, &slot_writer_spec, &small_pickler_spec, &recorder_spec};
    for (size_t i = 0; i < sizeof(specs) / sizeof(*specs); i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[i], NULL);
        if (!type) return -1;
        if (specs[i] == &doorbell_spec) state->doorbell = (PyTypeObject *)Py_NewRef(type);
        int failed = PyModule_AddType(module, (PyTypeObject *)type);
        Py_DECREF(type);
        if (failed) return -1;
    }
    return 0;
}

static int visit_state(PyObject *module, visitproc visit, void *arg) {
    ModuleState *state = PyModule_GetState(module);
    Py_VISIT(state->doorbell);
    return 0;
}

static int clear_state(PyObject *module) {
    ModuleState *state = PyModule_GetState(module);
    Py_CLEAR(state->doorbell);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)add_types}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "raylane.core._native",
    .m_doc = "Native twin of raylane.core.portable.",
    .m_size = sizeof(ModuleState),
    .m_traverse = visit_state,
    .m_clear = clear_state,
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }
