"""What keeps the emulator from starting. May import: nothing."""


class CusimError(RuntimeError):
    """The emulator cannot be built or started; the message says what is missing and what to do."""
