# build_identity.h: the version and TANDEM_KERN_BUILD, a hash over everything that decides the bits of an answer: the
# sources below, the compiler and its flags. It is part of the numerics identity, so that results of two different
# builds of the kernels are never mixed in one state folder. Written anew only when it changes.
file(GLOB identity_sources CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/engine/cpu/*.[ch]")
if(TARGET kern_cuda)
    file(GLOB cuda_sources CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/cuda/*.cu" "${CMAKE_SOURCE_DIR}/cuda/*.cuh")
    list(APPEND identity_sources ${cuda_sources})
endif()
list(SORT identity_sources)
foreach(file IN ITEMS
        engine/comm.h engine/comm_shm.c engine/comm_shm.h engine/exact_math.c engine/exact_math.h engine/kern.h
        engine/sampler.c engine/sampler.h engine/model/model_forward.c engine/model/model_forward.h
        engine/model/partition.c engine/model/partition.h engine/model/quant.c engine/model/quant.h)
    if(EXISTS "${CMAKE_SOURCE_DIR}/${file}")
        list(APPEND identity_sources "${CMAKE_SOURCE_DIR}/${file}")
    endif()
endforeach()
set_property(DIRECTORY "${CMAKE_SOURCE_DIR}" APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${identity_sources})

string(TOUPPER "${CMAKE_BUILD_TYPE}" build_type)
get_target_property(common_flags tandem_plain_flags INTERFACE_COMPILE_OPTIONS)
list(FILTER common_flags EXCLUDE REGEX "^-W")
set(identity "${CMAKE_C_COMPILER_ID} ${CMAKE_C_COMPILER_VERSION} ${CMAKE_SYSTEM_PROCESSOR}\n")
string(APPEND identity "${CMAKE_C_FLAGS} ${CMAKE_C_FLAGS_${build_type}} ${common_flags} openmp=${TANDEM_OPENMP}\n")
if(TARGET kern_cuda)
    string(APPEND identity "${CMAKE_CUDA_COMPILER_ID} ${CMAKE_CUDA_COMPILER_VERSION} ${CMAKE_CUDA_FLAGS}\n")
endif()
foreach(isa IN LISTS kern_isas ITEMS vnni amx)
    string(APPEND identity "${isa} ${kern_flags} ${kern_flags_${isa}}\n")
endforeach()
foreach(file IN LISTS identity_sources)
    file(SHA256 "${file}" digest)
    get_filename_component(name "${file}" NAME)
    string(APPEND identity "${name} ${digest}\n")
endforeach()
string(SHA256 kern_build "${identity}")
string(SUBSTRING "${kern_build}" 0 32 kern_build)

file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/generated/build_identity.h" CONTENT
"/* Made by cmake/build_identity.cmake. */
#ifndef TANDEM_BUILD_IDENTITY_H
#define TANDEM_BUILD_IDENTITY_H

#define TANDEM_VERSION \"@PROJECT_VERSION@\"
#define TANDEM_KERN_BUILD \"@kern_build@\"

#endif
" @ONLY)
get_target_property(runner_type runner TYPE)
if(runner_type STREQUAL "INTERFACE_LIBRARY")
    target_include_directories(runner INTERFACE "${CMAKE_BINARY_DIR}/generated")
else()
    target_include_directories(runner PUBLIC "${CMAKE_BINARY_DIR}/generated")
endif()
