"""`explain.distribution.packaging`, under its public name."""

from explain.distribution.packaging import Packaged, PackageReport, Patterns, export_package, import_package

__all__ = ["PackageReport", "Packaged", "Patterns", "export_package", "import_package"]
