// zerort.native._kernels.Repeater: a collective that was made before, made again from its arguments: look it up, see that it may be
// made here and now, take its shortcut, count it, promise its result. Warm, Python is as fast at these steps; but between two calls
// of ranks that share a core nothing stays warm, and its many short steps then take twice as long (decision 0205).
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
nb::object call(const nb::object& callable) { return checked(PyObject_CallNoArgs(callable.ptr())); }
nb::object call(const nb::object& callable, nb::handle argument) {
  return checked(PyObject_CallOneArg(callable.ptr(), argument.ptr()));
}
nb::object id(nb::handle object) { return checked(PyLong_FromVoidPtr(object.ptr())); }

// A lock that knows its owner: taken for a block, unless another thread has it, or this one already.
class Turn {
 public:
  explicit Turn(nb::handle lock)
      : is_owned_(get(lock, interned("_is_owned"))), acquire_(get(lock, interned("acquire"))), release_(get(lock, interned("release"))) {}

  class Taken {
   public:
    explicit Taken(const Turn& turn)
        : turn_(turn), is_mine_(!call(turn.is_owned_).is(Py_True) && call(turn.acquire_, nb::handle(Py_False)).is(Py_True)) {}
    Taken(const Taken&) = delete;
    Taken& operator=(const Taken&) = delete;
    ~Taken() {
      if (is_mine_) Py_XDECREF(PyObject_CallNoArgs(turn_.release_.ptr()));
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
        nothing_(call(promise_, nb::handle(Py_None))) {}

  // Make the call with this number, as this rank's callers count. Returns the promise of its result; (what is known of it, how far it
  // came, its out) if it is not done; or None, if it is not known or something is in the way. An error means that it was left in
  // its middle.
  nb::object again(std::int64_t sequence, nb::handle op, nb::handle name, nb::handle source, nb::handle out, nb::handle counts,
                   nb::handle root, nb::handle reduction) {
    const bool is_new = out.is_none() && !source.is_none();  // the result is an array of ours
    const nb::object known = find(op, name, source, out, counts, root, reduction, is_new);
    if (!known.is_valid()) return nb::none();
    const nb::object shortcut = get(known, names_.shortcut);
    if (shortcut.is_none() || shortcut.is(Py_False) || nb::cast<std::int64_t>(get(known, names_.nbytes)) > most_nbytes_ ||
        !get(transport_, names_.broken).is_none() || !call(is_tracing_).is(Py_False))
      return nb::none();
    nb::object made;
    {
      const Turn::Taken taken(turn_);
      if (!taken || PyObject_Size(queue_.ptr()) != 0 || must_give_way()) return nb::none();
      // A thread that had the turn may have counted meetings besides.
      const nb::object number = nb::int_(sequence + nb::cast<std::int64_t>(get(differences_, names_.surplus)));
      PyObject* arguments[] = {shortcut.ptr(), number.ptr(), source.ptr(), out.ptr()};
      made = checked(PyObject_VectorcallMethod(is_new ? names_.run_new.ptr() : names_.run.ptr(), arguments, is_new ? 3 : 4, nullptr));
    }
    nb::object result = nb::borrow(out);
    if (is_new && !PyLong_CheckExact(made.ptr())) {  // (how far it came, its out), or its out
      const bool is_done = !PyTuple_CheckExact(made.ptr());
      result = is_done ? made : nb::object(made[1]);
      made = is_done ? nb::object(nb::int_(kDone)) : nb::object(made[0]);
    }
    if (nb::cast<int>(made) != kDone) return nb::make_tuple(known, made, result);
    call(count_, op);
    return get(known, names_.delivers).is(Py_True) ? call(promise_, result) : nothing_;
  }

 private:
  // The call that was made with the same arguments from the same line: the verb's caller's, or if that is a line of zerort's own, the
  // user's behind it.
  nb::object find(nb::handle op, nb::handle name, nb::handle source, nb::handle out, nb::handle counts, nb::handle root,
                  nb::handle reduction, bool is_new) const {
    try {
      const nb::object first = is_new ? get(source, names_.shape) : id(source);
      const nb::object second = is_new ? get(source, names_.dtype) : id(out);
      for (const nb::object* frame_of : {&frame_at_, &users_frame_}) {
        const nb::object frame = call(*frame_of, depth_), line = get(frame, names_.f_lasti);
        const nb::object code = checked(reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
        // As `key_of` of zerort/comm/prepared.py makes it.
        const nb::object key = checked(PyTuple_Pack(9, op.ptr(), first.ptr(), second.ptr(), id(code).ptr(), line.ptr(),
                                                    counts.ptr(), root.ptr(), reduction.ptr(), name.ptr()));
        PyObject* found = PyDict_GetItemWithError(known_.ptr(), key.ptr());
        if (found != nullptr) return nb::borrow(found);
        if (PyErr_Occurred()) nb::raise_python_error();
      }
    } catch (const nb::python_error& error) {
      // No array, say, or counts that cannot be looked up: it is told later.
      if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_AttributeError)) throw;
    }
    return {};
  }

  bool must_give_way() const {
    return get(differences_, names_.is_known).is(Py_True) && !get(differences_, names_.stance).is_none();
  }

  struct Names {
    nb::object shortcut = interned("shortcut"), nbytes = interned("nbytes"), delivers = interned("delivers"),
               broken = interned("broken"), is_known = interned("is_known"), stance = interned("stance"),
               surplus = interned("surplus"), run = interned("run"), run_new = interned("run_new"), shape = interned("shape"),
               dtype = interned("dtype"), f_lasti = interned("f_lasti");
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

}  // namespace

void bind_repeater(nb::module_& module) {
  nb::class_<Repeater>(module, "Repeater")
      .def(nb::init<nb::dict, nb::object, nb::object, nb::handle, nb::object, std::int64_t, nb::object, nb::object, nb::object,
                    nb::object, nb::object>(),
           nb::arg("known"), nb::arg("transport"), nb::arg("differences"), nb::arg("turn"), nb::arg("queue"),
           nb::arg("most_nbytes"), nb::arg("frame_at"), nb::arg("users_frame"), nb::arg("is_tracing"), nb::arg("count"),
           nb::arg("promise"))
      .def("again", &Repeater::again, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(),
           nb::arg());
}

}  // namespace zerort
