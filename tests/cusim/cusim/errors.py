"""What keeps the emulator from starting."""


class CusimError(RuntimeError):
    """The emulator cannot be built or started; the message says what is missing and what to do."""
