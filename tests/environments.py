"""What lies in a Python environment that the fixture `bare` has made."""


def python_in(environment):
    return str(environment / "bin" / "python")


def packages_of(environment):
    return next((environment / "lib").glob("python*/site-packages"))


def put_empty(packages, *names):
    """Modules that can be found and hold nothing."""
    for name in names:
        (packages / name).mkdir()
        (packages / name / "__init__.py").touch()
