"""The one exception that means "the user can mend this": every command prints it in one line and exits with 2."""


class UsageError(ValueError):
    """Bad input, or an environment the user has to mend; the message names the key and the valid choices."""


def unknown_name(kind: str, name: object, known) -> UsageError:
    """An unknown name lists the known names: `unknown family 'cmm'; known: cnn, mlp, transformer`."""
    return UsageError(f"unknown {kind} {name!r}; known: {', '.join(sorted(map(str, known)))}")
