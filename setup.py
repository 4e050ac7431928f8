"""Package metadata comes from settings.ini, the file that nbdev reads."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

parser = ConfigParser(delimiters=["="])
parser.read(Path(__file__).parent / "settings.ini", encoding="utf-8")
settings = parser["DEFAULT"]
extras = {name: settings[f"{name}_requirements"].split() for name in ("figures", "kernels")}

setup(
    name=settings["lib_name"],
    version=settings["version"],
    description=settings["description"],
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=settings["author"],
    author_email=settings["author_email"],
    license="Apache-2.0",
    python_requires=">=" + settings["min_python"],
    packages=find_packages(include=["kvbook", "kvbook.*"]),
    package_data={"kvbook": ["lab/static/*.js", "lab/static/*.css"]},
    install_requires=settings["requirements"].split(),
    extras_require={**extras, "all": [line for lines in extras.values() for line in lines]},
    entry_points={"console_scripts": ["kvbook = kvbook.cli:main"]},
)
