#define ISA portable_reach
#define LANES 4
#include "reach_kernel.h"

namespace vllm_evict {
const BoxProducts portable_boxes = portable_reach::box_products;
}
