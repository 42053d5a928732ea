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


def put_installed(packages, versions):
    """Modules that can be found, with the versions of their packages."""
    for name, version in versions.items():
        module = name.replace("-", "_")
        (packages / module).mkdir(exist_ok=True)
        (packages / module / "__init__.py").touch()
        facts = packages / f"{module}.dist-info" / "METADATA"
        facts.parent.mkdir(exist_ok=True)
        facts.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
