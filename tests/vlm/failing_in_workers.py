"""A processor and a row that fail in a worker process, which imports them from here."""


class OddError(RuntimeError):
    """Can be pickled, and not be made again from the pickle."""

    def __init__(self, *, what):
        super().__init__(f"no {what}")


class Odd:
    """A processor that fails."""

    def apply_chat_template(self, *args, **options):
        raise OddError(what="template")


class NotThere:
    """Fails where it is unpickled."""

    def __reduce__(self):
        return open, ("/nonexistent/file",)
