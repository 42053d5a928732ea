# What is changed in llama.cpp's build, see docs/decisions/0005-llama-cpp-build.md: its common library, which is a third of
# the work and of which nothing is used, is left out, and the standard headers are compiled once.
set(LLAMA_BUILD_COMMON OFF)
cmake_language(DEFER CALL target_precompile_headers llama PRIVATE
  <algorithm> <array> <cmath> <functional> <map> <memory> <regex> <set> <sstream> <string> <unordered_map> <vector>)
