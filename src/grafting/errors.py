"""The one exception for what a user can mend."""


class UserError(Exception):
    """Something the user can put right: the message says what is wrong, where, and what to do.

    The command line prints it without a traceback and exits with status 2.
    """
