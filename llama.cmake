# What is changed in llama.cpp's build, see docs/decisions/0005-llama-cpp-build.md: its common library, which is a third of
# the work and of which nothing is used, is left out; the standard headers are compiled once; the many small graphs of
# models are compiled 20 at a time; and what computes nothing itself is optimized little (ggml's kernels are as they were).
set(LLAMA_BUILD_COMMON OFF)
cmake_language(DEFER CALL target_precompile_headers llama PRIVATE
  <algorithm> <array> <cmath> <functional> <map> <memory> <regex> <set> <sstream> <string> <unordered_map> <vector>)
cmake_language(DEFER CALL target_compile_options llama PRIVATE -O1)

function(quantkit_join_models)
  get_target_property(sources llama SOURCES)
  list(FILTER sources EXCLUDE REGEX "models/[^/]*\\.cpp$")
  set_source_files_properties(${sources} TARGET_DIRECTORY llama PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  set_target_properties(llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 20)
endfunction()
cmake_language(DEFER CALL quantkit_join_models)
