// Included by kernels; all of it is in language.h already.
#pragma once
