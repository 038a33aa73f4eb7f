"""The log messages of ebbtide, printed on rank 0 unless the script has configured logging itself."""

import logging

STYLE = "[%(asctime)s] [%(levelname)s] %(message)s"  # DeepSpeed's format, without line numbers


class _NamedLines(logging.Formatter):
    """A log formatter that puts ebbtide's name before each message that does not begin with this name."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        if not record.message.startswith(("ebbtide", "plan=")):
            record.message = f"ebbtide: {record.message}"
        return super().formatMessage(record)


def show(rank: int) -> None:
    """Print ebbtide's log messages from level INFO on rank 0, unless the script has configured logging.

    A level or a handler that the script has set for the logger ``"ebbtide"`` is kept. If the script has set
    up handlers for all loggers, ebbtide's messages go to these handlers.
    """
    logger = logging.getLogger("ebbtide")
    if rank != 0:
        return
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(_NamedLines(STYLE))
        logger.addHandler(handler)
        logger.propagate = False  # otherwise each line would appear twice if a library configures the root logger later
