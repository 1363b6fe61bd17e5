// Registration: how the emulator finds a compiled kernel, its parameters' sizes, and a way to call it.
#pragma once

template <class... Parameters>
struct cusim_caller {
  template <size_t... I>
  static void call_with(void *function, void **arguments, std::index_sequence<I...>) {
    ((void (*)(Parameters...))function)(*(typename std::remove_reference<Parameters>::type *)arguments[I]...);
  }
  static void call(void *function, void **arguments) { call_with(function, arguments, std::index_sequence_for<Parameters...>()); }
  static const cusim_parameter *parameters() {
    static const cusim_parameter all[] = {{(unsigned)sizeof(Parameters), std::is_pointer<Parameters>::value}..., {0, false}};
    return all;
  }
};

template <class... Parameters>
cusim_kernel cusim_describe(const char *name, void (*function)(Parameters...)) {
  typedef cusim_caller<Parameters...> Caller;
  return {name, (void *)function, &Caller::call, (int)sizeof...(Parameters), Caller::parameters()};
}
