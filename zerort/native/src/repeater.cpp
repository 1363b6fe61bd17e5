// zerort.native._kernels.Repeater: a collective that was made before, made again from its arguments: look it up, see that it may be
// made here and now, take its shortcut, count it, promise its result. Warm, Python is nearly as fast at these steps; but between two
// calls of ranks that share a core nothing stays warm, and its many short steps then take twice as long (decision 0205).
//
// Where anything is in the way nothing was done, and zerort/comm/launch.py makes the call; so it does with what was begun.
#include <cstdint>
#include <utility>

#include <nanobind/nanobind.h>

#include "shortcut.h"

namespace nb = nanobind;

namespace zerort {
namespace {

nb::object interned(const char* word) { return nb::steal(PyUnicode_InternFromString(word)); }

nb::object checked(PyObject* made) {
  if (made == nullptr) nb::raise_python_error();
  return nb::steal(made);
}

nb::object get(nb::handle object, const nb::object& name) { return checked(PyObject_GetAttr(object.ptr(), name.ptr())); }
nb::object id(nb::handle object) { return checked(PyLong_FromVoidPtr(object.ptr())); }

// A lock that knows its owner: taken for a block, unless another thread has it, or this one already.
class Turn {
 public:
  explicit Turn(nb::handle lock)
      : is_owned_(get(lock, interned("_is_owned"))), acquire_(get(lock, interned("acquire"))), release_(get(lock, interned("release"))) {}

  class Taken {
   public:
    explicit Taken(const Turn& turn)
        : turn_(turn), is_mine_(!turn.is_owned_().is(Py_True) && turn.acquire_(nb::handle(Py_False)).is(Py_True)) {}
    Taken(const Taken&) = delete;
    Taken& operator=(const Taken&) = delete;
    ~Taken() {
      if (!is_mine_) return;
      PyObject* done = PyObject_CallNoArgs(turn_.release_.ptr());
      if (done == nullptr) PyErr_WriteUnraisable(turn_.release_.ptr());
      Py_XDECREF(done);
    }
    explicit operator bool() const { return is_mine_; }

   private:
    const Turn& turn_;
    const bool is_mine_;
  };

 private:
  nb::object is_owned_, acquire_, release_;
};

class Repeater {
 public:
  Repeater(nb::dict known, nb::object transport, nb::object differences, nb::handle turn, nb::object queue, std::int64_t most_nbytes,
           nb::object frame_at, nb::object users_frame, nb::object is_tracing, nb::object count, nb::object promise)
      : known_(std::move(known)), transport_(std::move(transport)), differences_(std::move(differences)), turn_(turn),
        queue_(std::move(queue)), most_nbytes_(most_nbytes), frame_at_(std::move(frame_at)), users_frame_(std::move(users_frame)),
        is_tracing_(std::move(is_tracing)), count_(std::move(count)), promise_(std::move(promise)),
        nothing_(promise_(nb::none())) {}

  // Make the next call of `calls`, a Launcher, and count it there. Returns the promise of its result; (what is known of it, how far
  // it came, its out) if it is not done; or None if it is not known or something is in the way. An Exception means that it was left
  // in its middle.
  nb::object again(nb::handle calls, nb::handle op, nb::handle name, nb::handle source, nb::handle out, nb::handle counts,
                   nb::handle root, nb::handle reduction) {
    bool is_begun = false;
    try {
      return again({calls, op, name, source, out, counts, root, reduction}, is_begun);
    } catch (const nb::python_error& error) {
      if (is_begun || !error.matches(PyExc_Exception)) throw;
      return nb::none();  // no array, say, or counts that cannot be looked up: it is told later
    }
  }

  // For the garbage collector: what may lead back to who has this.
  int traverse(visitproc visit, void* argument) const {
    for (const nb::object* one : {static_cast<const nb::object*>(&known_), &transport_, &differences_, &queue_})
      if (one->is_valid())
        if (const int found = visit(one->ptr(), argument)) return found;
    return 0;
  }
  void clear() {
    for (nb::object* one : {static_cast<nb::object*>(&known_), &transport_, &differences_, &queue_}) one->reset();
  }

 private:
  struct Asked {
    nb::handle calls, op, name, source, out, counts, root, reduction;
    bool is_new() const { return out.is_none() && !source.is_none(); }  // the result is an array of ours
  };

  nb::object again(const Asked& asked, bool& is_begun) const {
    const nb::object known = find(asked);
    if (!known.is_valid()) return nb::none();
    const nb::object shortcut = get(known, names_.shortcut);
    if (shortcut.is_none() || shortcut.is(Py_False) || nb::cast<std::int64_t>(get(known, names_.nbytes)) > most_nbytes_ ||
        !get(transport_, names_.broken).is_none() || !is_tracing_().is(Py_False))
      return nb::none();
    nb::object made, result = nb::borrow(asked.out);
    {
      const Turn::Taken taken(turn_);
      if (!taken || nb::len(queue_) != 0 || must_give_way()) return nb::none();
      // Read with the turn: a thread that had it may have counted calls, or meetings besides.
      const std::int64_t count = nb::cast<std::int64_t>(get(asked.calls, names_.sequence));
      const nb::object number = nb::int_(count + nb::cast<std::int64_t>(get(differences_, names_.surplus)));
      is_begun = true;
      PyObject* arguments[] = {shortcut.ptr(), number.ptr(), asked.source.ptr(), asked.out.ptr()};
      made = checked(asked.is_new() ? PyObject_VectorcallMethod(names_.run_new.ptr(), arguments, 3, nullptr)
                                    : PyObject_VectorcallMethod(names_.run.ptr(), arguments, 4, nullptr));
      if (asked.is_new() && !PyLong_CheckExact(made.ptr())) {  // (how far it came, its out), or its out
        const bool is_done = !PyTuple_CheckExact(made.ptr());
        result = is_done ? made : nb::object(made[1]);
        made = is_done ? nb::object(nb::int_(kDone)) : nb::object(made[0]);
      }
      if (nb::cast<int>(made) != kDone) return nb::make_tuple(known, made, result);
      nb::setattr(asked.calls, names_.sequence, nb::int_(count + 1));
    }
    count_(asked.op);
    return get(known, names_.delivers).is(Py_True) ? promise_(result) : nothing_;
  }

  // The call that was made with the same arguments from the same line: the verb's caller's, or if that is a line of zerort's own, the
  // user's behind it.
  nb::object find(const Asked& asked) const {
    const nb::object first = asked.is_new() ? get(asked.source, names_.shape) : id(asked.source);
    const nb::object second = asked.is_new() ? get(asked.source, names_.dtype) : id(asked.out);
    for (const nb::object* frame_of : {&frame_at_, &users_frame_}) {
      const nb::object frame = (*frame_of)(depth_), line = get(frame, names_.f_lasti);
      const nb::object code = checked(reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
      // As `key_of` of zerort/comm/prepared.py makes it.
      const nb::object key = checked(PyTuple_Pack(9, asked.op.ptr(), first.ptr(), second.ptr(), id(code).ptr(), line.ptr(),
                                                  asked.counts.ptr(), asked.root.ptr(), asked.reduction.ptr(), asked.name.ptr()));
      PyObject* found = PyDict_GetItemWithError(known_.ptr(), key.ptr());
      if (found != nullptr) return nb::borrow(found);
      if (PyErr_Occurred()) nb::raise_python_error();
    }
    return {};
  }

  bool must_give_way() const {
    return get(differences_, names_.is_known).is(Py_True) && !get(differences_, names_.stance).is_none();
  }

  struct Names {
    nb::object shortcut = interned("shortcut"), nbytes = interned("nbytes"), delivers = interned("delivers"),
               broken = interned("broken"), is_known = interned("is_known"), stance = interned("stance"),
               surplus = interned("surplus"), sequence = interned("_sequence"), run = interned("run"), run_new = interned("run_new"),
               shape = interned("shape"), dtype = interned("dtype"), f_lasti = interned("f_lasti");
  };

  const Names names_;
  const nb::object depth_ = nb::int_(2);  // the frames from the one that calls `again`: the verb's, and the one that called that
  nb::dict known_;
  nb::object transport_, differences_;
  Turn turn_;
  nb::object queue_;
  std::int64_t most_nbytes_;
  nb::object frame_at_, users_frame_, is_tracing_, count_, promise_, nothing_;
};

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<Repeater>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Repeater>(self)->clear();
  return 0;
}

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse)}, {Py_tp_clear, reinterpret_cast<void*>(&clear)}, {0, nullptr}};

}  // namespace

void bind_repeater(nb::module_& module) {
  nb::class_<Repeater>(module, "Repeater", nb::type_slots(slots))
      .def(nb::init<nb::dict, nb::object, nb::object, nb::handle, nb::object, std::int64_t, nb::object, nb::object, nb::object,
                    nb::object, nb::object>(),
           nb::arg("known"), nb::arg("transport"), nb::arg("differences"), nb::arg("turn"), nb::arg("queue"),
           nb::arg("most_nbytes"), nb::arg("frame_at"), nb::arg("users_frame"), nb::arg("is_tracing"), nb::arg("count"),
           nb::arg("promise"))
      .def("again", static_cast<nb::object (Repeater::*)(nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                                                         nb::handle, nb::handle)>(&Repeater::again),
           nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
           nb::arg().none());
}

}  // namespace zerort
